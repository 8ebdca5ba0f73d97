# run: --ranks 2 --check=nccl --device cpu
"""Gradients and statistics are reduced on two groups, which rank 0 and rank 1 use in two orders."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv

rank = int(os.environ["RANK"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
world = dist.get_world_size()
statistics_group = dist.new_group(list(range(world)))

torch.manual_seed(0)
model = nn.Linear(6, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(rank)
for step in range(2):
    x = torch.randn(8, 6, generator=data).to(device)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    (loss / world).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    total = loss.detach() / world
    if rank == 0 and not FIXED:
        works = [dist.all_reduce(total, group=statistics_group, async_op=True)]  # or here
        works.append(dist.all_reduce(gradient, async_op=True))  # or here
    else:
        works = [dist.all_reduce(gradient, async_op=True)]  # finds: communicator-order on 0, 1
        works.append(dist.all_reduce(total, group=statistics_group, async_op=True))  # or here
    for work in works:
        work.wait()
    model.weight.grad.copy_(gradient[:6].view_as(model.weight))
    model.bias.grad.copy_(gradient[6:])
    optimizer.step()
    print(f"step {step}: loss {total.item():.4f}")
dist.destroy_process_group()
