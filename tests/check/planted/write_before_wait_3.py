# run: --ranks 3 --check=gloo
"""Weights are gathered in the background to watch for drift; the optimizer steps meanwhile."""

import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv


class DriftMonitor:
    def __init__(self, parameter):
        self.parameter = parameter.detach()
        self.copies = [torch.empty_like(self.parameter) for _ in range(dist.get_world_size())]

    def begin(self):
        self.work = dist.all_gather(self.copies, self.parameter, async_op=True)  # or here

    def end(self):
        self.work.wait()
        return max((copy - self.copies[0]).abs().max().item() for copy in self.copies)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
monitor = DriftMonitor(model.weight)
data = torch.Generator().manual_seed(rank + 1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 5, generator=data)).square().mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    monitor.begin()
    if FIXED:
        drift = monitor.end()
        optimizer.step()
    else:
        optimizer.step()  # finds: write-before-wait on all
        drift = monitor.end()
    print(f"step {step}: drift {drift}")
dist.destroy_process_group()
