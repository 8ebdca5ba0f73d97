"""Epochs of a DistributedSampler over samples that do not divide evenly, with DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
samples = torch.randn(44, 10, generator=torch.Generator().manual_seed(0))
data = TensorDataset(samples, samples[:, :3].prod(1, keepdim=True))
torch.manual_seed(8)
model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
turn = rank  # @turn
sampler = DistributedSampler(data, size, turn, seed=5)
loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=False)  # @loader
for epoch in range(3):
    sampler.set_epoch(epoch)  # @epoch
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)  # @forward
        optimizer.zero_grad()
        loss.backward()  # @backward
        optimizer.step()  # @update
    sums = torch.tensor([loss.item(), len(x)])  # @sums
    dist.all_reduce(sums)  # @log
dist.destroy_process_group()
