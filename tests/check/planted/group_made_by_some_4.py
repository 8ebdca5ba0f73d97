# run: --ranks 4 --check
"""Groups are made on first use, by a cache; the first use is in the embedding ranks alone."""

import functools
import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv


@functools.cache
def group_of(ranks):
    return dist.new_group(list(ranks))  # finds: group-made-by-some on 0, 3


class Stage(nn.Module):
    """The first and the last stage hold the tied embedding and add its gradients."""

    def __init__(self, rank, world):
        super().__init__()
        self.tied = (0, world - 1)
        self.has_embedding = rank in self.tied
        if FIXED:
            group_of(self.tied)
        self.weight = nn.Parameter(torch.full((4, 3), 0.5))

    def reduce_embedding(self):
        if self.has_embedding:
            dist.all_reduce(self.weight.grad, group=group_of(self.tied))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
stage = Stage(rank, world)
x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
(x @ stage.weight).square().sum().backward()
stage.reduce_embedding()
print("gradient", stage.weight.grad.norm().item())
dist.barrier()
dist.destroy_process_group()
