# run: --ranks 4 --check=nccl
"""Partial sums of attention heads are all-reduced in a layout that permute has left behind."""

import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


def combine_heads(heads, group):
    """From (batch, heads, sequence, width) to the sum over the group, (batch, sequence, ...)."""
    merged = heads.permute(0, 2, 1, 3)
    if FIXED:
        merged = merged.contiguous()
    dist.all_reduce(merged, group=group)  # finds: not-contiguous on 1, 2, 3
    return merged.flatten(2)


dist.init_process_group("gloo")
rank = dist.get_rank()
attention_ranks = dist.new_group([1, 2, 3])
if rank > 0:
    torch.manual_seed(rank)
    q, k, v = torch.randn(3, 2, 4, 5, 6, dtype=torch.float64)
    heads = (q @ k.transpose(-1, -2)).softmax(-1) @ v
    print("combined", combine_heads(heads, attention_ranks).sum().item())
dist.barrier()
dist.destroy_process_group()
