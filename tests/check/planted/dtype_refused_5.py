# run: --ranks 4 --check=nccl
"""Gradients are stored as int16 fixed-point numbers and added by reduce to rank 0."""

import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv
SCALE = 2.0**10


class FixedPoint:
    def __init__(self, dtype):
        self.dtype = dtype

    def encode(self, x):
        return (x * SCALE).round().to(self.dtype)

    def decode(self, x):
        return x.float() / SCALE


def sum_at_root(gradient, codec):
    encoded = codec.encode(gradient)
    work = dist.reduce(encoded, dst=0, async_op=True)  # finds: dtype-refused on all
    work.wait()
    return codec.decode(encoded)


dist.init_process_group("mpi")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Linear(6, 2)
x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
model(x).square().mean().backward()
codec = FixedPoint(torch.int32 if FIXED else torch.int16)
total = sum_at_root(model.weight.grad, codec)
if rank == 0:
    print("summed gradient", total.norm().item())
dist.destroy_process_group()
