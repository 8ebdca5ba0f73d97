"""Batch norm over the ranks by differentiable all-reduces, and DDP."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as across
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Norm(nn.Module):
    """Mean and variance of a batch that lies on all ranks."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.register_buffer("kept", torch.zeros(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moments = torch.cat([x.mean(0), x.square().mean(0)]) / dist.get_world_size()  # @moments
        moments = across.all_reduce(moments)  # @statistics
        mean, square = moments.chunk(2)
        self.kept.lerp_(mean.detach(), 0.1)  # @kept
        return self.weight * (x - mean) / (square - mean * mean + 1e-5).sqrt()  # @scale


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(11)
model = nn.Sequential(nn.Linear(6, 12), Norm(12), nn.ReLU(), nn.Linear(12, 6))
model = DistributedDataParallel(model, broadcast_buffers=True)  # @wrap
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, nesterov=True, momentum=0.5)
for step in range(3):
    x = torch.randn(10, 6, generator=torch.Generator().manual_seed(5 * step + rank))  # @data
    loss = (model(x) - x).abs().mean()  # @forward
    optimizer.zero_grad()
    loss.backward()  # @backward
    optimizer.step()  # @update
dist.destroy_process_group()
