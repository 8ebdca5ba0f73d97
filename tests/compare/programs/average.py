"""Weights are averaged every second step, an average over time is evaluated, with dropout."""

import copy

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(9)
model = nn.Sequential(nn.Linear(12, 24), nn.Dropout(0.3), nn.ReLU(), nn.Linear(24, 2))  # @layers
smooth = copy.deepcopy(model)
torch.manual_seed(90 + rank)  # @dropout
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
for step in range(6):
    x = torch.randn(8, 12)
    loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())  # @forward
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # @update
    with torch.no_grad():
        if step % 2:
            for p in model.parameters():
                dist.all_reduce(p, op=dist.ReduceOp.SUM)  # @average
                p /= size  # @mean
        for p, q in zip(model.parameters(), smooth.parameters(), strict=True):
            q.lerp_(p, 0.1)  # @smooth
        smooth.eval()
        right = (smooth(x).argmax(1) == (x[:, 0] > 0)).sum()
        scores = [torch.zeros_like(right) for _ in range(size)]
        dist.all_gather(scores, right)  # @scores
        norms = torch.stack([p.norm() for p in smooth.parameters()])
        dist.all_gather([torch.empty(4) for _ in range(size)], norms)  # @norms
dist.destroy_process_group()
