# run: --ranks 2 --check=gloo
"""A convolutional pipeline in channels_last hands its activation to the next stage."""

import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv


def head(images):
    layer = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
    activation = layer(images.to(memory_format=torch.channels_last))
    if FIXED:
        activation = activation.contiguous()
    dist.isend(activation, dst=1).wait()  # finds: not-contiguous on 0
    return activation.mean()


def tail(batch):
    activation = torch.empty(batch, 4, 8, 8)
    if not FIXED:
        activation = activation.to(memory_format=torch.channels_last)
    dist.recv(activation, src=0)  # or here
    return nn.functional.adaptive_avg_pool2d(activation, 1).sum()


dist.init_process_group()
rank = dist.get_rank()
torch.manual_seed(rank)
with torch.no_grad():
    result = head(torch.randn(2, 3, 8, 8)) if rank == 0 else tail(2)
print("result", result.item())
dist.destroy_process_group()
