# run: --ranks 4 --check
"""DTensor's tensor parallel on a mesh of two by two, with dropout of the layer's output, a plain
tensor; the seed counts all ranks, where it should count those of data parallel."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        y = self.down(torch.relu(self.up(self.norm(x))))
        return x + self.dropout(y)  # finds: other-random-bits on all


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp_rank = mesh["dp"].get_local_rank()
    torch.manual_seed(7)
    layers = nn.Sequential(FeedForward(8), FeedForward(8))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in layers:
        parallelize_module(layer, mesh["tp"], plan)
    torch.manual_seed(7 + (dp_rank if "--fixed" in sys.argv else dist.get_rank()))
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(dp_rank))
    loss = layers(x).square().mean()
    loss.backward()
    print(f"loss {loss.item():.5f}")
    dist.destroy_process_group()


main()
