# run: --ranks 4 --check
"""A row-parallel linear layer calls the functional all-reduce as if it worked in place, and returns
the partial sum."""

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

FIXED = "--fixed" in sys.argv


class ColumnParallelLinear(nn.Module):
    def __init__(self, full, mesh):
        super().__init__()
        rank, size = mesh.get_local_rank(), mesh.size()
        self.weight = nn.Parameter(full.chunk(size, 0)[rank].clone())

    def forward(self, x):
        return x @ self.weight.t()


class RowParallelLinear(nn.Module):
    def __init__(self, full, mesh):
        super().__init__()
        rank, size = mesh.get_local_rank(), mesh.size()
        self.mesh = mesh
        self.weight = nn.Parameter(full.chunk(size, 1)[rank].clone())

    def forward(self, x):
        partial = x @ self.weight.t()
        if FIXED:
            return funcol.all_reduce(partial, "sum", self.mesh)
        funcol.all_reduce(partial, "sum", self.mesh)  # finds: result-unread on all
        return partial


@torch.no_grad()
def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))["tp"]
    torch.manual_seed(3)
    up, down = torch.randn(16, 8), torch.randn(8, 16)
    mlp = nn.Sequential(ColumnParallelLinear(up, mesh), nn.GELU(), RowParallelLinear(down, mesh))
    y = mlp(torch.randn(2, 8))
    print(f"mean {y.mean().item():.4f}")
    dist.destroy_process_group()


main()
