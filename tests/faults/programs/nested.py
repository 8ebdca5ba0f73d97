"""Groups of two, along and across: those without the dead rank go on."""

import datetime
import os

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
for step in range(3):
    for name, group in (("row", rows[rank // 2]), ("column", columns[rank % 2])):
        total = torch.ones(1) * (rank + 1)
        try:
            dist.all_reduce(total, group=group)
            print(f"rank {rank} step {step} {name}: {total.item()}", flush=True)
        except RuntimeError as error:
            print(f"rank {rank} step {step} {name}: {type(error).__name__}", flush=True)
