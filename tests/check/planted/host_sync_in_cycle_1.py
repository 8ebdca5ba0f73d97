# run: --ranks 2 --check=nccl --device cpu
"""A benchmark of two groups synchronizes after each call; ranks take the groups in two orders."""

import os
import sys
import time

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


def measure(group, elements):
    x = torch.ones(elements, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    dist.all_reduce(x, group=group)  # finds: host-sync-in-cycle on all
    torch.cuda.synchronize()
    return x.sum().item() / elements, time.perf_counter() - start


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
groups = {"default": dist.group.WORLD, "copy": dist.new_group([0, 1])}
names = list(groups)
if local_rank == 1 and not FIXED:
    names.reverse()
for name in names:
    value, seconds = measure(groups[name], 1000)
    print(name, value, seconds < 60)
dist.destroy_process_group()
