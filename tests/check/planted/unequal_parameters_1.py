# run: --ranks 4 --check
"""DDP with ReduceLROnPlateau, which each rank steps with the validation loss of its own shard: one
rank's learning rate drops earlier than that of the others."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau


def train_epoch(model, optimizer, loader):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()  # finds: unequal-parameters on 3


@torch.no_grad()
def validate(model, x, y):
    model.eval()
    return nn.functional.mse_loss(model(x), y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(24, 5, generator=generator)
    y = x.sum(1, keepdim=True)
    loader = list(zip(x.split(8), y.split(8), strict=True))
    held_out = torch.randn(8, 5, generator=generator)
    labels = held_out.sum(1, keepdim=True) * (1.0 if rank < 3 else -1.0)

    model = DistributedDataParallel(nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for epoch in range(4):
        train_epoch(model, optimizer, loader)
        loss = validate(model.module, held_out, labels)
        if args.fixed:
            dist.all_reduce(loss)
            loss /= world
        scheduler.step(loss.item())
        print(f"epoch {epoch}: validation loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
