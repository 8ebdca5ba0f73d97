# run: --ranks 2 --check=gloo
"""A hand-written data-parallel loop whose gradient norm is taken while the all-reduces run."""

import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv


def start_reductions(parameters):
    return [dist.all_reduce(p.grad, async_op=True) for p in parameters]  # or here


def gradient_norm(parameters):
    return torch.stack([p.grad.norm() for p in parameters]).norm()  # finds: read-before-wait on all


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = torch.Generator().manual_seed(rank)

for step in range(3):
    x = torch.randn(4, 8, generator=data)
    loss = model(x).square().mean() / world
    optimizer.zero_grad()
    loss.backward()
    parameters = list(model.parameters())
    handles = start_reductions(parameters)
    if FIXED:
        for handle in handles:
            handle.wait()
        norm = gradient_norm(parameters)
    else:
        norm = gradient_norm(parameters)
        for handle in handles:
            handle.wait()
    optimizer.step()
    print(f"step {step}: gradient norm {norm.item():.4f}")
dist.destroy_process_group()
