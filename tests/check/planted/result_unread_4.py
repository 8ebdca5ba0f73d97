# run: --ranks 4 --check=nccl --device cpu
"""The gradients' norm for the log is summed over the tensor-parallel group in a float32 copy, and
logged from the bfloat16 original."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn


def make_groups(size):
    rank = dist.get_rank()
    mine = None
    for start in range(0, dist.get_world_size(), size):
        ranks = list(range(start, start + size))
        group = dist.new_group(ranks)
        if rank in ranks:
            mine = group
    return mine


def gradient_norm(parameters, group, fixed):
    squares = torch.stack([p.grad.square().sum() for p in parameters]).sum()
    if fixed:
        squares = squares.float()
        dist.all_reduce(squares, group=group)
    else:
        dist.all_reduce(squares.float(), group=group)  # finds: result-unread on all
    return squares.sqrt().item()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    group = make_groups(2)
    torch.cuda.manual_seed(dist.get_rank())
    shard = nn.Linear(12, 6, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.ones(3, 12, device="cuda", dtype=torch.bfloat16)
    shard(x).square().sum().backward()
    norm = gradient_norm(list(shard.parameters()), group, fixed="--fixed" in sys.argv)
    if dist.get_rank(group) == 0:
        print(f"gradient norm {norm:.3f}")
    dist.destroy_process_group()


main()
