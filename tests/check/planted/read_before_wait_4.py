# run: --ranks 3 --check=gloo
"""A forward-only pipeline of three stages: a stage runs its layer on a message still on its way."""

import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv
HIDDEN = 6


def run_stage(layer, micro_batches, rank, world):
    outputs = []
    for step in range(len(micro_batches)):
        if rank == 0:
            activation = micro_batches[step]
            request = None
        else:
            activation = torch.empty(2, HIDDEN)
            request = dist.irecv(activation, src=rank - 1)  # or here
        if FIXED and request is not None:
            request.wait()
        hidden = torch.relu(layer(activation))  # finds: read-before-wait on 1, 2
        if request is not None:
            request.wait()
        if rank < world - 1:
            dist.send(hidden, dst=rank + 1)
        else:
            outputs.append(hidden)
    return outputs


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(100 + rank)
layer = nn.Linear(HIDDEN, HIDDEN)
micro_batches = torch.randn(4, 2, HIDDEN).unbind()
with torch.no_grad():
    outputs = run_stage(layer, micro_batches, rank, world)
if outputs:
    print("mean output", torch.stack(outputs).mean().item())
dist.destroy_process_group()
