# run: --ranks 3 --check=nccl
"""Ranks report which errors they have seen as bits of a mask, joined by a bitwise or."""

import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv
OVERFLOW, NAN, EMPTY = 1, 2, 4


def local_flags(gradient):
    flags = 0
    if gradient.isinf().any():
        flags |= OVERFLOW
    if gradient.isnan().any():
        flags |= NAN
    if gradient.numel() == 0:
        flags |= EMPTY
    return flags


def global_flags(flags):
    if FIXED:
        bits = torch.tensor([flags >> i & 1 for i in range(3)])
        dist.all_reduce(bits, op=dist.ReduceOp.MAX)
        return sum(bit << i for i, bit in enumerate(bits.tolist()))
    mask = torch.tensor(flags)
    dist.all_reduce(mask, op=dist.ReduceOp.BOR)  # finds: dtype-refused on all
    return mask.item()


dist.init_process_group("gloo")
gradient = torch.tensor([1.0, float("inf") if dist.get_rank() == 1 else 2.0])
print("flags", global_flags(local_flags(gradient)))
dist.destroy_process_group()
