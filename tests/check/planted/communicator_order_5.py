# run: --ranks 5 --check=nccl
"""A queue of reductions is flushed when it is full; on one rank overflow counts overtake a loss."""

import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv
CAPACITY = 6
SUM = dist.ReduceOp.SUM


class Pending:
    def __init__(self):
        self.queue = []

    def push(self, tensor, group, urgent=False):
        self.queue.insert(0 if urgent and not FIXED else len(self.queue), (tensor, group))

    def flush(self):
        works = []
        for tensor, group in self.queue:
            work = dist.all_reduce(tensor, SUM, group, True)  # finds: communicator-order on 0, 3
            works.append(work)
        self.queue.clear()
        for work in works:
            work.wait()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
routers = dist.new_group([0, 3])
pending = Pending()
loss = torch.tensor(1.0 + rank)
pending.push(loss, dist.group.WORLD)
if rank in (0, 3):
    tokens = 5 + rank
    overflow = torch.tensor([max(0, tokens - CAPACITY), 1])
    pending.push(overflow, routers, urgent=tokens > CAPACITY)
pending.flush()
if rank in (0, 3):
    print("overflow", overflow.tolist())
print("loss", loss.item() / world)
dist.destroy_process_group()
