# run: --ranks 3 --check=gloo
"""Heartbeats: after each chunk of its work a rank posts a reduction; some have more chunks."""

import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


class Progress:
    def __init__(self):
        self.pending = []
        self.finished = 0

    def report(self, rows):
        count = torch.tensor(rows)
        work = dist.all_reduce(count, async_op=True)  # finds: uneven-calls on 2
        self.pending.append((work, count))

    def collect(self, rounds):
        for work, count in self.pending[:rounds]:
            work.wait()
            self.finished += count.item()
        return self.finished


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
table = torch.arange(30.0)
chunks = list(table.split([9, 9, 12])[rank].split(3))
rounds = 3
if FIXED:
    rounds = 4
    chunks += [table[:0]] * (rounds - len(chunks))
progress = Progress()
total = 0.0
for chunk in chunks:
    total += chunk.sqrt().sum().item()
    progress.report(len(chunk))
print("rows", progress.collect(rounds), "sum", total)
dist.destroy_process_group()
