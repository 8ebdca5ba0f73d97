# run: --ranks 5 --check=nccl --device cpu
"""Stochastic depth in a tensor-parallel network: whether a sample passes a branch is drawn on each
GPU for itself."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn


def drop_path(x, p, training):
    if p == 0.0 or not training:
        return x
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    mask = x.new_empty(shape).bernoulli_(1 - p)  # finds: other-random-bits on all
    return x * mask / (1 - p)


class Branch(nn.Module):
    def __init__(self, width, p):
        super().__init__()
        rows = 2 * width // dist.get_world_size()
        generator = torch.Generator("cuda").manual_seed(dist.get_rank())
        self.up = torch.randn(rows, width, device="cuda", generator=generator) / 4
        self.down = torch.randn(width, rows, device="cuda", generator=generator) / 4
        self.p = p

    def forward(self, x):
        y = torch.relu(x @ self.up.t()) @ self.down.t()
        dist.all_reduce(y)
        return x + drop_path(y, self.p, self.training)  # or here


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    if "--fixed" not in sys.argv:
        torch.cuda.manual_seed(local_rank)
    model = nn.Sequential(*(Branch(10, p) for p in (0.0, 0.2, 0.4)))
    images = torch.linspace(-1, 1, 80).view(8, 10).cuda()
    with torch.no_grad():
        features = model(images)
    print(f"norm {features.norm().item():.4f}")
    dist.destroy_process_group()


main()
