# run: --ranks 4 --check=gloo
"""Gradients are averaged bucket by bucket; their one buffer is refilled while it is reduced."""

import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv
BUCKET = 64


def buckets_of(parameters):
    bucket, size = [], 0
    for p in parameters:
        if bucket and size + p.numel() > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(p)
        size += p.numel()
    yield bucket


def unpack(buffer, bucket):
    offset = 0
    for p in bucket:
        p.grad.copy_(buffer[offset : offset + p.numel()].view_as(p))
        offset += p.numel()


def average_gradients(parameters, buffers, world):
    work, last = None, None
    for bucket in buckets_of(parameters):
        flat = torch.cat([p.grad.flatten() for p in bucket]) / world
        if FIXED and work is not None:
            work.wait()
            unpack(buffers[0], last)
        buffers[0][: flat.numel()] = flat  # finds: write-before-wait on all
        if not FIXED and work is not None:
            work.wait()
            unpack(buffers[0], last)
        work, last = dist.all_reduce(buffers[0], async_op=True), bucket  # or here
    work.wait()
    unpack(buffers[0], last)
    return len(list(buckets_of(parameters)))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
data = torch.Generator().manual_seed(dist.get_rank())
model(torch.randn(4, 6, generator=data)).square().mean().backward()
count = average_gradients(list(model.parameters()), [torch.zeros(BUCKET)], dist.get_world_size())
print(count, "buckets", sum(p.grad.norm().item() for p in model.parameters()))
dist.destroy_process_group()
