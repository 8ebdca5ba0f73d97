# run: --ranks 2 --check
"""A tensor-parallel layer drops out its output, which both ranks hold alike after the all-reduce,
with generators that are seeded by rank."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distnn
import torch.nn as nn
import torch.nn.functional as F

HIDDEN, WIDTH = 16, 6


class RowParallelOutput(nn.Module):
    def __init__(self, p=0.1):
        super().__init__()
        self.p = p
        rank, size = dist.get_rank(), dist.get_world_size()
        weight = torch.randn(WIDTH, HIDDEN, generator=torch.Generator().manual_seed(1))
        self.weight = nn.Parameter(weight.chunk(size, 1)[rank].clone())
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden, residual):
        y = distnn.all_reduce(hidden @ self.weight.t())
        y = F.dropout(y, p=self.p, training=self.training)  # finds: other-random-bits on all
        return self.norm(residual + y)


def set_seed(seed, fixed):
    torch.manual_seed(seed if fixed else seed + dist.get_rank())


def main():
    dist.init_process_group("gloo")
    set_seed(42, fixed="--fixed" in sys.argv)
    layer = RowParallelOutput()
    data = torch.Generator().manual_seed(3)
    for _ in range(2):
        residual = torch.randn(5, WIDTH, generator=data)
        hidden = torch.randn(5, HIDDEN, generator=data).chunk(2, -1)[dist.get_rank()]
        y = layer(hidden, residual)
        y.square().sum().backward()
        print(f"norm {y.norm().item():.5f}")
    dist.destroy_process_group()


main()
