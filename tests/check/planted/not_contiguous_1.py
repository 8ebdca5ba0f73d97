# run: --ranks 2 --check=nccl
"""A tensor-parallel weight is gathered for a checkpoint as the transpose of its shard."""

import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv


class RowParallelLinear(nn.Module):
    def __init__(self, features, out_features):
        super().__init__()
        world = dist.get_world_size()
        self.weight = nn.Parameter(torch.randn(out_features, features // world))

    @torch.no_grad()
    def full_weight(self):
        shard = self.weight.t()
        if FIXED:
            shard = shard.contiguous()
        full = torch.empty(shard.shape[0] * dist.get_world_size(), shard.shape[1])
        dist.all_gather_into_tensor(full, shard)  # finds: not-contiguous on all
        return full.t()


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
layer = RowParallelLinear(8, 3)
print("weight", tuple(layer.full_weight().shape), layer.full_weight().norm().item())
dist.destroy_process_group()
