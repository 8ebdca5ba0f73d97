# run: --ranks 3 --check
"""A parameter server receives the gradients of its workers into one buffer at the same time."""

import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv


def collect(size, workers):
    buffer = torch.zeros(size)
    buffers = {w: torch.zeros(size) if FIXED else buffer for w in workers}
    requests = []
    for worker in workers:
        request = dist.irecv(buffers[worker], src=worker)  # finds: overlapping-buffers on 0
        requests.append(request)
    total = torch.zeros(size)
    for worker, request in zip(workers, requests, strict=True):
        request.wait()
        total += buffers[worker]
    return total / len(workers)


dist.init_process_group("gloo")
rank = dist.get_rank()
workers = range(1, dist.get_world_size())
torch.manual_seed(0)
model = nn.Linear(4, 2)
size = sum(p.numel() for p in model.parameters())
if rank == 0:
    print("mean gradient", collect(size, workers).norm().item())
else:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.send(gradient, dst=0)
dist.destroy_process_group()
