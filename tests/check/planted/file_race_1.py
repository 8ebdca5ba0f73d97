# run: --ranks 4 --check
"""Rank 0 prepares the first checkpoint, and all ranks load it at once."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def checkpoint_path():
    folder = os.environ.get("SCRATCH", tempfile.gettempdir())
    return os.path.join(folder, f"ddp-checkpoint-{os.environ['MASTER_PORT']}.pt")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    path = checkpoint_path()
    if rank == 0:
        torch.save(model.state_dict(), path)  # or here
    if args.fixed:
        dist.barrier()
    model.load_state_dict(torch.load(path, map_location="cpu"))  # finds: file-race on 1, 2, 3
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
    optimizer.step()
    dist.barrier()
    if rank == 0:
        os.remove(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
