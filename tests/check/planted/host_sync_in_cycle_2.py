# run: --ranks 2 --check=nccl --device cpu
"""Losses of two tasks are reduced and logged with .item(), each rank beginning with its own."""

import os
import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


class TaskLoss:
    def __init__(self, name, ranks):
        self.name = name
        self.group = dist.new_group(ranks)

    def reduce(self, loss):
        group = self.group
        work = dist.all_reduce(loss, group=group, async_op=True)  # finds: host-sync-in-cycle on all
        work.wait()
        return loss.item() / group.size()


rank = int(os.environ["RANK"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
tasks = [TaskLoss("detection", [0, 1]), TaskLoss("segmentation", [0, 1])]
first = 0 if FIXED else rank
report = {}
for i in range(2):
    task = tasks[(first + i) % 2]
    loss = torch.tensor(0.5 * (rank + 1), device=device)
    report[task.name] = task.reduce(loss)
print(sorted(report.items()))
dist.destroy_process_group()
