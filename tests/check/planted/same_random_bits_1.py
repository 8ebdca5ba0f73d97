# run: --ranks 4 --check
"""A tensor-parallel feed-forward layer drops out its hidden activations, of which each rank has
other columns, while all ranks are seeded alike."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class ParallelFeedForward(nn.Module):
    def __init__(self, width, hidden, p):
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        up, down = torch.randn(hidden, width) / 4, torch.randn(width, hidden) / 4
        self.norm = nn.LayerNorm(width)
        self.up = nn.Parameter(up.chunk(size, 0)[rank].clone())
        self.down = nn.Parameter(down.chunk(size, 1)[rank].clone())
        self.p = p

    def forward(self, x):
        h = F.gelu(CopyToRanks.apply(self.norm(x)) @ self.up.t())
        h = F.dropout(h, self.p, self.training)  # finds: same-random-bits on all
        return x + SumOverRanks.apply(h @ self.down.t())


dist.init_process_group("gloo")
torch.manual_seed(1234)
model = ParallelFeedForward(8, 32, p=0.2)
if "--fixed" in sys.argv:
    torch.manual_seed(1234 + dist.get_rank())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(5)
for _ in range(2):
    x = torch.randn(16, 8, generator=data)
    optimizer.zero_grad()
    F.mse_loss(model(x), x.flip(-1)).backward()
    optimizer.step()
dist.destroy_process_group()
