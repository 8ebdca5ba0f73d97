# run: --ranks 5 --check=nccl
"""A batch with a loss that is not finite is skipped on the rank that has it, reduction and all."""

import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv


def average_gradients(parameters, world):
    flat = torch.cat([p.grad.flatten() for p in parameters]) / world
    dist.all_reduce(flat)  # finds: uneven-calls on 0, 1, 2, 4
    offset = 0
    for p in parameters:
        p.grad = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)
for step in range(3):
    x = torch.randn(4, 3, generator=generator)
    if rank == 3 and step == 1:
        x[0, 0] = float("nan")
    if FIXED:
        x = x.nan_to_num()
    optimizer.zero_grad()
    loss = model(x).square().mean()
    if not torch.isfinite(loss):
        print(f"step {step}: skipped")
        continue
    loss.backward()
    average_gradients(list(model.parameters()), world)
    optimizer.step()
print("weights", model.weight.tolist())
dist.destroy_process_group()
