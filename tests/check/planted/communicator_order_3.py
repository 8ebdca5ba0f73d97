# run: --ranks 3 --check=nccl
"""Gossip averaging on a ring: each rank starts with its right neighbour, then takes its left."""

import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


def make_edges(world):
    """The group of each edge of the ring, by its lower end."""
    return [dist.new_group(sorted({i, (i + 1) % world})) for i in range(world)]


def gossip(weights, edges, rank, world):
    mine = [rank, (rank - 1) % world]
    if FIXED:
        mine.sort()
    copies = [weights / 2 for _ in mine]
    works = []
    for edge, copy in zip(mine, copies, strict=True):
        group = edges[edge]
        work = dist.all_reduce(copy, group=group, async_op=True)  # finds: communicator-order on all
        works.append(work)
    for work in works:
        work.wait()
    return sum(copies) / 2


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
edges = make_edges(world)
weights = torch.full((4,), float(rank))
for _ in range(5):
    weights = gossip(weights, edges, rank, world)
print("weights", weights.tolist())
dist.destroy_process_group()
