# run: --ranks 4 --check
"""NVIDIA/Megatron-LM#1446: with sequence parallelism, the final norm is not among the norms whose
gradients are summed over the tensor-parallel ranks."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        rank, size = dist.get_rank(), dist.get_world_size()
        up, down = torch.randn(4 * width, width) / 4, torch.randn(width, 4 * width) / 8
        self.up = nn.Parameter(up.chunk(size, 0)[rank].clone())
        self.down = nn.Parameter(down.chunk(size, 1)[rank].clone())

    def forward(self, x):
        y = all_gather_tensor_autograd(self.norm(x), 0, dist.group.WORLD)
        y = torch.relu(y @ self.up.t()) @ self.down.t()
        return x + reduce_scatter_tensor_autograd(y, "sum", 0, dist.group.WORLD)


class Decoder(nn.Module):
    def __init__(self, width=8, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.final_norm = nn.LayerNorm(width)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.final_norm(x)


def reduce_norm_gradients(model, fixed):
    norms = [layer.norm for layer in model.layers] + ([model.final_norm] if fixed else [])
    for parameter in (p for norm in norms for p in norm.parameters()):
        dist.all_reduce(parameter.grad)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(2):
    sequence = torch.randn(16, 3, 8, generator=torch.Generator().manual_seed(step))
    part = sequence.chunk(dist.get_world_size())[dist.get_rank()]
    optimizer.zero_grad()
    (model(part) - part.roll(1, -1)).square().sum().backward()
    reduce_norm_gradients(model, fixed="--fixed" in sys.argv)
    optimizer.step()  # finds: gradient-not-reduced on all
dist.destroy_process_group()
