# run: --ranks 2 --check=nccl --device cpu
"""Rank 0 makes itself a gloo group for its checkpoints, which rank 1 does not know of."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv


class Checkpointer:
    def __init__(self, rank):
        self.group = None
        if FIXED:
            self.group = dist.new_group([0], backend="gloo")
        elif rank == 0:
            self.group = dist.new_group([0], backend="gloo")  # finds: group-made-by-some on 0

    def checksum(self, module):
        total = sum(p.detach().double().sum() for p in module.parameters()).cpu()
        dist.all_reduce(total, group=self.group)
        return total.item()


rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(0)
model = nn.Linear(3, 3).cuda()
checkpointer = Checkpointer(rank)
if rank == 0:
    print("checksum", checkpointer.checksum(model))
loss = model(torch.ones(1, 3, device="cuda")).sum().detach()
dist.all_reduce(loss)
print("loss", loss.item())
dist.destroy_process_group()
