# run: --ranks 3 --check=nccl --device cpu
"""Tokens are sent to their experts; dropped ones are zeroed in the send buffer before the wait."""

import os
import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


def dispatch(tokens, capacity_mask, group):
    received = torch.empty_like(tokens)
    if FIXED:
        tokens[~capacity_mask] = 0.0
    work = dist.all_to_all_single(received, tokens, group=group, async_op=True)  # or here
    if not FIXED:
        tokens[~capacity_mask] = 0.0  # finds: write-before-wait on 0, 2
    work.wait()
    return received


rank = int(os.environ["RANK"])
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}")
torch.cuda.set_device(device)
dist.init_process_group("nccl")
experts = dist.new_group([0, 2])
if rank in (0, 2):
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(6, 4, generator=generator).to(device)
    mask = torch.tensor([True, True, False, True, True, False], device=device)
    received = dispatch(tokens, mask, experts)
    print("received", received.sum(-1).tolist())
dist.barrier()
dist.destroy_process_group()
