# run: --ranks 4 --check
"""Sequence parallel, two by two: the norm's output is dropped out in parts of the sequence; the
seed counts data-parallel ranks only, so that both parts lose the same places."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.distributed.device_mesh import init_device_mesh


class SequenceParallelBlock(nn.Module):
    def __init__(self, width, mesh, p=0.1):
        super().__init__()
        self.mesh = mesh
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(p)
        rank, size = mesh.get_local_rank(), mesh.size()
        up, down = torch.randn(4 * width, width) / 4, torch.randn(width, 4 * width) / 8
        self.up = nn.Parameter(up.chunk(size, 0)[rank].clone())
        self.down = nn.Parameter(down.chunk(size, 1)[rank].clone())

    def forward(self, x):
        y = self.dropout(self.norm(x))  # finds: same-random-bits on all
        y = all_gather_tensor_autograd(y, 0, self.mesh.get_group())
        y = torch.relu(y @ self.up.t()) @ self.down.t()
        return x + reduce_scatter_tensor_autograd(y, "sum", 0, self.mesh.get_group())


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    dp_rank, sp_rank = mesh["dp"].get_local_rank(), mesh["sp"].get_local_rank()
    torch.manual_seed(99)
    model = nn.Sequential(*(SequenceParallelBlock(8, mesh["sp"]) for _ in range(2)))
    data = torch.Generator().manual_seed(dp_rank)
    sequence = torch.randn(12, 3, 8, generator=data)
    torch.manual_seed(99 + dp_rank)
    if "--fixed" in sys.argv:
        torch.manual_seed(99 + dist.get_rank())
    y = model(sequence.chunk(2, 0)[sp_rank])
    loss = y.square().mean()
    loss.backward()
    print(f"loss {loss.item():.4f}")
    dist.destroy_process_group()


main()
