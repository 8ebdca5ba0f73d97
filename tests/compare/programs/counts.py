"""Batches of different lengths: the loss is divided by the samples of all ranks."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(13)
model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
lengths = [4, 8, 6, 2]  # @lengths
draws = torch.Generator().manual_seed(60 + rank)
for step in range(3):
    count = lengths[(rank + step) % size]  # @count
    x = torch.randn(count, 6, generator=draws)  # @data
    total = torch.tensor(float(count))
    dist.all_reduce(total)  # @total
    optimizer.zero_grad()
    loss = (model(x) - x[:, :2]).square().sum() / total  # @loss
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(gradients)  # @sum
    start = 0
    for p in model.parameters():
        p.grad = gradients[start : start + p.numel()].view_as(p)
        start += p.numel()
    optimizer.step()  # @update
dist.destroy_process_group()
