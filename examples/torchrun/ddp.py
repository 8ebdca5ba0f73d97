"""DistributedDataParallel: a classifier of three spirals, with gradient accumulation.

torchrun --standalone --nproc-per-node 4 ddp.py
gpusim torchrun --nproc-per-node 64 --reduction nccl-ring ddp.py
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spirals(points: int, seed: int) -> TensorDataset:
    """Points of three arms, with noise, and the arm of each."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(points) % 3
    radius = torch.rand(points, generator=generator)
    angle = 4 * radius + labels * 2.1 + 0.1 * torch.randn(points, generator=generator)
    return TensorDataset(torch.stack([radius * angle.sin(), radius * angle.cos()], 1), labels)


def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """The share of right answers on the data of all ranks."""
    model.eval()
    counts = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in loader:
            right = model(x.to(device)).argmax(1) == y.to(device)
            counts += torch.tensor([right.sum(), right.numel()], device=device)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main() -> None:
    parser = argparse.ArgumentParser(description="DDP on three spirals")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=8, help="of a rank")
    parser.add_argument("--points", type=int, default=1536)
    parser.add_argument("--accumulate", type=int, default=2, help="batches for each step")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--out", help="a file for the final weights")
    options = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.accelerator.is_available():
        device = torch.device(torch.accelerator.current_accelerator().type, local_rank)
        torch.accelerator.set_device_index(local_rank)
    else:
        device = torch.device("cpu")
    dist.init_process_group(backend=dist.get_default_backend_for_device(device))
    rank = dist.get_rank()

    train, test = spirals(options.points, 1), spirals(512, 2)
    sampler: DistributedSampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader: DataLoader = DataLoader(train, batch_size=options.batch_size, sampler=sampler)
    test_sampler: DistributedSampler = DistributedSampler(test, shuffle=False)
    test_loader: DataLoader = DataLoader(test, batch_size=64, sampler=test_sampler)

    torch.manual_seed(rank)  # DDP broadcasts the weights of rank 0
    network = nn.Sequential(
        nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.Dropout(0.1), nn.SiLU(), nn.Linear(64, 3)
    )
    model = DDP(network.to(device), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr * 10, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)

    losses = []
    for epoch in range(options.epochs):
        model.train()
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)
        for number, (x, y) in enumerate(loader, 1):
            last = number % options.accumulate == 0 or number == len(loader)
            model.require_backward_grad_sync = last  # what model.no_sync() sets
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            (loss / options.accumulate).backward()
            total += torch.tensor([loss.detach(), 1.0], device=device)
            if last:
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        dist.all_reduce(total)
        losses.append((total[0] / total[1]).item())
        if rank == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.6f}", flush=True)
    accuracy = evaluate(model, test_loader, device)
    if rank == 0:
        print(f"accuracy {accuracy:.4f}", flush=True)
        if options.out:
            weights = model.module.state_dict()
            torch.save({"model": weights, "losses": losses, "accuracy": accuracy}, options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
