# run: --ranks 3 --check=nccl --device cpu
"""Neighbours on a ring compare checksums on the host; each begins with its right neighbour."""

import os
import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


class Neighbours:
    def __init__(self, rank, world):
        self.edges = []
        for left in range(world):
            right = (left + 1) % world
            group = dist.new_group(sorted((left, right)))
            if rank == left or rank == right:
                self.edges.append((right if rank == left else left, left == rank, group))
        if not FIXED:
            self.edges.sort(key=lambda edge: not edge[1])

    def same(self, checksum):
        result = {}
        for peer, _, group in self.edges:
            pair = [torch.empty_like(checksum) for _ in range(2)]
            work = dist.all_gather(pair, checksum, group, True)  # finds: host-sync-in-cycle on all
            work.wait()
            done = torch.cuda.Event()
            done.record()
            done.synchronize()
            result[peer] = bool(torch.equal(pair[0], pair[1]))
        return result


rank = int(os.environ["RANK"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
neighbours = Neighbours(rank, dist.get_world_size())
weights = torch.linspace(0, 1, 7, device=device)
print("same", sorted(neighbours.same(weights.sum()).items()))
dist.destroy_process_group()
