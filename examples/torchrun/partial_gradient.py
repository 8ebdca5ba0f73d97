"""A tensor-parallel perceptron that forgets one all-reduce of its backward pass; --fixed has it.

torchrun --nproc-per-node 2 partial_gradient.py
"""

import sys

import torch
import torch.distributed as dist
from torch import nn


class Sum(torch.autograd.Function):  # adds the ranks' parts; each part gets the sum's gradient
    @staticmethod
    def forward(ctx, part):
        dist.all_reduce(whole := part.clone())
        return whole

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Copy(torch.autograd.Function):  # all ranks have x; each has a part of its gradient
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, part):
        dist.all_reduce(whole := part.clone())
        return whole


class ParallelMLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.up = nn.Parameter(torch.randn(hidden, width).chunk(size, 0)[rank] / 2)
        self.down = nn.Parameter(torch.randn(width, hidden).chunk(size, 1)[rank] / 4)

    def forward(self, x):  # each rank has its share of the hidden units
        if "--fixed" in sys.argv:
            x = Copy.apply(x)
        return Sum.apply(torch.relu(x @ self.up.T) @ self.down.T)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(5, 6), nn.LayerNorm(6)
        self.mlp, self.last = ParallelMLP(6, 24), nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.mlp(self.norm(x)))


dist.init_process_group("gloo")
torch.manual_seed(0)
model, x, y = Model(), torch.randn(7, 5), torch.randn(7, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(20):
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0 and step % 19 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
