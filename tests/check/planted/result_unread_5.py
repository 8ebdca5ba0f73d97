# run: --ranks 5 --check
"""A synchronized batch norm reduces mean and square asynchronously, waits, and then normalizes by
its own statistics."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn


class SyncedNorm(nn.Module):
    def __init__(self, features, fixed, momentum=0.1):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_square", torch.ones(features))
        self.momentum = momentum
        self.fixed = fixed

    def forward(self, x):
        mean, square = x.mean(0), x.square().mean(0)
        statistics = torch.stack([mean, square]) / dist.get_world_size()
        work = dist.all_reduce(statistics, async_op=True)  # finds: result-unread on all
        centred = x - self.running_mean
        work.wait()
        if self.fixed:
            mean, square = statistics
        self.running_mean.lerp_(mean, self.momentum)
        self.running_square.lerp_(square, self.momentum)
        variance = self.running_square - self.running_mean.square()
        return centred / (variance + 1e-5).sqrt()


parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
args = parser.parse_args()
dist.init_process_group("gloo")
norm = SyncedNorm(4, args.fixed)
with torch.no_grad():
    for _ in range(3):
        y = norm(torch.randn(6, 4) + dist.get_rank())
print(f"rank {dist.get_rank()}: running mean {norm.running_mean.mean().item():.4f}")
dist.destroy_process_group()
