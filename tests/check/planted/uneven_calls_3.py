# run: --ranks 4 --check=nccl --device cpu
"""The first rank of a sub-group logs the mean loss, and it alone calls the all-reduce for it."""

import os
import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


def is_main():
    return dist.get_rank() == 1


def mean_loss(loss, group):
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)  # finds: uneven-calls on 1
    return total.item() / group.size()


def evaluate(x, group):
    loss = x.square().mean()
    if FIXED:
        mean = mean_loss(loss, group)
        if is_main():
            print("loss", mean)
    elif is_main():
        print("loss", mean_loss(loss, group))


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
group = dist.new_group([1, 2, 3])
if local_rank > 0:
    generator = torch.Generator().manual_seed(local_rank)
    evaluate(torch.randn(5, generator=generator).cuda(), group)
dist.destroy_process_group()
