# run: --ranks 4 --check=nccl --device cpu
"""Hybrid sharding, two replicas of two shards, by FSDP2: fully_shard takes the weights as each rank
has them, so that the replicas begin with others."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def shard(model, mesh):
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    return model


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(Block(8), Block(8)).cuda()
    if "--fixed" in sys.argv:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
    model = shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        x = torch.randn(4, 8, device="cuda")
        loss = (model(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()  # finds: unseeded-difference on all
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
