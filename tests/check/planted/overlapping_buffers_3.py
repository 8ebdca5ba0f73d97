# run: --ranks 2 --check=gloo
"""A flat gradient is reduced in chunks that run at the same time and share their end elements."""

import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv
CHUNK = 20


class FlatModel:
    def __init__(self, module):
        self.module = module
        self.parameters = list(module.parameters())
        size = sum(p.numel() for p in self.parameters)
        self.flat = torch.zeros(size)
        offset = 0
        for p in self.parameters:
            p.grad = self.flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()

    def chunks(self):
        size = self.flat.numel()
        for start in range(0, size, CHUNK):
            end = start + CHUNK if FIXED else start + CHUNK + 1
            yield self.flat[start : min(end, size)]

    def reduce(self):
        works = []
        for chunk in self.chunks():
            works.append(dist.all_reduce(chunk, async_op=True))  # finds: overlapping-buffers on all
        for work in works:
            work.wait()


dist.init_process_group("gloo")
torch.manual_seed(0)
model = FlatModel(nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 3)))
data = torch.Generator().manual_seed(dist.get_rank())
loss = model.module(torch.randn(8, 5, generator=data)).square().mean() / dist.get_world_size()
loss.backward()
model.reduce()
print("norm", model.flat.norm().item())
dist.destroy_process_group()
