# run: --ranks 2 --check
"""A sharded bfloat16 weight is gathered by a functional operator, and used before wait_tensor."""

import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv
c10d = torch.ops._c10d_functional


class ShardedWeight:
    def __init__(self, rows, columns, group):
        self.group = group
        self.shard = torch.randn(rows // group.size(), columns, dtype=torch.bfloat16)
        self.pending = None

    def prefetch(self):
        size, name = self.group.size(), self.group.group_name
        self.pending = c10d.all_gather_into_tensor(self.shard, size, name)  # or here

    def unshard(self):
        if FIXED:
            return c10d.wait_tensor(self.pending)
        return self.pending


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
weights = [ShardedWeight(8, 8, dist.group.WORLD) for _ in range(3)]
x = torch.ones(2, 8, dtype=torch.bfloat16)
weights[0].prefetch()
for i, weight in enumerate(weights):
    if i + 1 < len(weights):
        weights[i + 1].prefetch()
    full = weight.unshard()
    x = torch.tanh(x @ full)  # finds: read-before-wait on all
    c10d.wait_tensor(weight.pending)
print(x.float().sum().item())
dist.destroy_process_group()
