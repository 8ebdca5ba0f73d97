# run: --ranks 5 --check=gloo
"""Rank 0 hands out work; the workers make a group of their own without it."""

import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


def coordinator(world):
    if FIXED:
        dist.new_group(list(range(1, world)))
    for worker in range(1, world):
        dist.send(torch.tensor([worker * 10, worker * 10 + 4]), dst=worker)
    result = torch.zeros(1, dtype=torch.float64)
    dist.recv(result, src=1)
    print("result", result.item())


def worker(rank, world):
    workers = dist.new_group(list(range(1, world)))  # finds: group-made-by-some on 1, 2, 3, 4
    bounds = torch.zeros(2, dtype=torch.int64)
    dist.recv(bounds, src=0)
    start, end = bounds.tolist()
    part = torch.arange(start, end, dtype=torch.float64).square().sum().reshape(1)
    dist.all_reduce(part, group=workers)
    print("part of the workers", part.item())
    if rank == 1:
        dist.send(part, dst=0)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if rank == 0:
    coordinator(world)
else:
    worker(rank, world)
dist.destroy_process_group()
