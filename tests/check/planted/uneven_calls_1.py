# run: --ranks 2 --check
"""DDP over a data set that does not divide evenly: rank 0 has a batch more."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv
BATCH = 4


def batches(data, rank, world):
    whole = len(data) // BATCH
    if FIXED:
        whole -= whole % world
    for i in range(rank, whole, world):
        yield data[i * BATCH : (i + 1) * BATCH]


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(22, 6)
for x in batches(data, rank, world):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()  # finds: uneven-calls on 0
    optimizer.step()
    print("loss", loss.item())
dist.destroy_process_group()
