# run: --ranks 2 --check
"""Gradient accumulation with DDP's no_sync. The last window of an epoch is shorter, and its update
is made of gradients that were all accumulated under no_sync."""

import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATION = 4


def train_epoch(model, optimizer, loader, fixed):
    pending = 0
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % ACCUMULATION == 0
        if fixed:
            last = last or i + 1 == len(loader)
        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(x), y) / ACCUMULATION
            loss.backward()
        pending += 1
        if last:
            optimizer.step()
            optimizer.zero_grad()
            pending = 0
    if pending:
        optimizer.step()  # finds: gradient-not-reduced on all
        optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    model = DDP(torch.nn.Linear(6, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        train_epoch(model, optimizer, loader, args.fixed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
