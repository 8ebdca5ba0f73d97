# run: --ranks 5 --check=nccl --device cpu
"""Validation losses go to the first rank of a sub-group; the other ranks return without waiting."""

import os
import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


class LossLogger:
    def __init__(self, group, root):
        self.group, self.root = group, root
        self.history = []

    def log(self, loss):
        total = loss.detach().clone()
        where = {"dst": self.root, "group": self.group}
        work = dist.reduce(total, **where, async_op=True)  # finds: never-waited on 2, 3, 4
        if not FIXED and dist.get_rank() != self.root:
            return
        work.wait()
        if dist.get_rank() == self.root:
            self.history.append(total.item() / self.group.size())


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
validators = dist.new_group([1, 2, 3, 4])
if local_rank > 0:
    logger = LossLogger(validators, root=1)
    generator = torch.Generator().manual_seed(local_rank)
    for _ in range(3):
        prediction = torch.randn(8, generator=generator).cuda()
        logger.log(prediction.square().mean())
    if local_rank == 1:
        print("validation losses", logger.history)
dist.barrier()
dist.destroy_process_group()
