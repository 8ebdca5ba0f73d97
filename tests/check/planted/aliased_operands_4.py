# run: --ranks 4 --check=gloo
"""Columns of a 2 x 2 grid gather weights in place; the slot is chosen by the rank in the row."""

import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


class GridWeight:
    def __init__(self, rows, group):
        self.group = group
        slots = group.size()
        self.full = torch.zeros(slots * rows, 3)
        slot = dist.get_group_rank(group, dist.get_rank()) if FIXED else dist.get_rank() % slots
        self.shard = self.full[slot * rows : (slot + 1) * rows]

    def materialize(self):
        full, shard = self.full, self.shard
        dist.all_gather_into_tensor(full, shard, self.group)  # finds: aliased-operands on 1, 2
        return full


dist.init_process_group("gloo")
rank = dist.get_rank()
columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
weight = GridWeight(2, columns[rank % 2])
weight.shard.fill_(rank + 1.0)
full = weight.materialize()
print("weight", full.sum(dim=-1).tolist())
dist.destroy_process_group()
