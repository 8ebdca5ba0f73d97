# run: --ranks 5 --check=nccl
"""Weights converted from another layout are broadcast from rank 0; one is stored transposed."""

import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv


def convert_conv1d(linear, weight):
    """GPT-2's Conv1D keeps its weight as (features, out_features)."""
    converted = weight.t()
    linear.weight = nn.Parameter(converted.contiguous() if FIXED else converted)
    return linear


@torch.no_grad()
def synchronize(module):
    works = []
    for p in module.parameters():
        works.append(dist.broadcast(p, src=0, async_op=True))  # finds: not-contiguous on all
    for work in works:
        work.wait()


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
layer = convert_conv1d(nn.Linear(4, 6), torch.randn(4, 6))
synchronize(layer)
with torch.no_grad():
    print("output", layer(torch.ones(1, 4)).sum().item())
dist.destroy_process_group()
