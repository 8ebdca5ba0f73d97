"""Survivors go on in a smaller group; the last rank dies."""

import datetime
import os

import torch
import torch.distributed as dist

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
group = None
for step in range(4):
    total = torch.ones(1) * (rank + 1)
    try:
        dist.all_reduce(total, group=group)
    except RuntimeError as error:
        print(f"rank {rank} step {step}: {'Connection closed' in str(error)}", flush=True)
        group = dist.new_group(range(ranks - 1), use_local_synchronization=True)
        total = torch.ones(1) * (rank + 1)
        dist.all_reduce(total, group=group)
    print(f"rank {rank} step {step}: {total.item()}", flush=True)
