# run: --ranks 4 --check=nccl --device cpu
"""ZeRO: the flat gradient is divided by the number of ranks after its reduce-scatter has begun."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv


class FlatGradients:
    def __init__(self, parameters, world):
        self.parameters = list(parameters)
        self.world = world
        size = sum(p.numel() for p in self.parameters)
        self.padded = -(-size // world) * world

    def flatten(self):
        flat = torch.cat([p.grad.flatten() for p in self.parameters])
        return torch.nn.functional.pad(flat, (0, self.padded - flat.numel()))

    def reduce(self):
        flat = self.flatten()
        shard = flat.new_empty(self.padded // self.world)
        if FIXED:
            flat /= self.world
            dist.reduce_scatter_tensor(shard, flat, async_op=True).wait()
            return shard
        work = dist.reduce_scatter_tensor(shard, flat, async_op=True)  # or here
        flat /= self.world  # finds: write-before-wait on all
        work.wait()
        return shard


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 2)).cuda()
generator = torch.Generator().manual_seed(local_rank)
model(torch.randn(3, 7, generator=generator).cuda()).square().sum().backward()
shard = FlatGradients(model.parameters(), dist.get_world_size()).reduce()
print("norm of the shard", shard.norm().item())
dist.destroy_process_group()
