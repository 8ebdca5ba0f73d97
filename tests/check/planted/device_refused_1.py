# run: --ranks 2 --check=nccl --device cpu
"""DDP on GPUs, with the loss of an epoch summed by an all-reduce of a tensor of the host."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv


def epoch_loss(total, count, device):
    sums = torch.tensor([total, count], dtype=torch.float64)
    if FIXED:
        sums = sums.to(device)
    dist.all_reduce(sums)  # finds: device-refused on all
    return (sums[0] / sums[1]).item()


local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(5, 2).to(device), device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(local_rank)
total = 0.0
for _ in range(3):
    x = torch.randn(4, 5, generator=data).to(device)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.item() * len(x)
print("loss of the epoch", epoch_loss(total, 12, device))
dist.destroy_process_group()
