# run: --ranks 2 --check
"""The first stage of a pipeline scales its activation in place while it is being sent."""

import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv


def first_stage(layer, batches):
    norm = 0.0
    for x in batches:
        hidden = layer(x)
        request = dist.isend(hidden, dst=1)  # or here
        if FIXED:
            request.wait()
        hidden.div_(hidden.norm())  # finds: write-before-wait on 0
        norm += hidden.abs().max().item()
        request.wait()
    return norm


def second_stage(layer, count):
    total = 0.0
    for _ in range(count):
        hidden = torch.empty(3, 5)
        dist.recv(hidden, src=0)
        total += layer(hidden).sum().item()
    return total


dist.init_process_group()
torch.manual_seed(7)
layers = nn.Linear(4, 5), nn.Linear(5, 2)
batches = torch.randn(3, 3, 4).unbind()
with torch.no_grad():
    if dist.get_rank() == 0:
        print("largest", first_stage(layers[0], batches))
    else:
        print("sum", second_stage(layers[1], len(batches)))
dist.destroy_process_group()
