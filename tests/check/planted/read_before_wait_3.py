# run: --ranks 4 --check=nccl --device cpu
"""Rows of tensor-parallel ranks gather the sequence; a matmul with it starts before the wait."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv


class GatheredColumnLinear(nn.Module):
    """Input split along the sequence, weight split along the output features."""

    def __init__(self, features, out_features, group):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.randn(out_features // group.size(), features))
        self.skip = nn.Linear(features, out_features // group.size())

    def forward(self, shard):
        full = shard.new_empty(shard.shape[0] * self.group.size(), shard.shape[1])
        work = dist.all_gather_into_tensor(full, shard, self.group, async_op=True)  # or here
        local = self.skip(shard)
        if FIXED:
            work.wait()
        y = full @ self.weight.t()  # finds: read-before-wait on all
        work.wait()
        return y, local


device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
rank = dist.get_rank()
rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
torch.manual_seed(rank)
layer = GatheredColumnLinear(8, 12, rows[rank // 2]).to(device)
with torch.no_grad():
    y, local = layer(torch.randn(5, 8, device=device))
print(tuple(y.shape), y.sum().item(), local.mean().item())
dist.destroy_process_group()
