# run: --ranks 3 --check=gloo
"""The validation loss is averaged over each rank's shard, and then over ranks, though the shards
are of 34, 33 and 33 examples."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def shard(data, rank, world):
    return data[rank::world]


@torch.no_grad()
def validation_loss(model, x, y, fixed):
    losses = F.cross_entropy(model(x), y, reduction="none")
    if fixed:
        sums = torch.stack([losses.sum(), torch.tensor(float(len(losses)))])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()
    loss = losses.mean()  # or here
    dist.all_reduce(loss)  # finds: mean-of-means on all
    return loss.item() / dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, y = torch.randn(100, 6), torch.randint(4, (100,))
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    loss = validation_loss(model, shard(x, rank, world), shard(y, rank, world), args.fixed)
    if rank == 0:
        print(f"validation loss {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
