"""A Megatron layer of DTensors: its columns and its rows are spread over the ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Layer(nn.Module):
    """Two linear layers, which the ranks share, beside a norm that each has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(self.norm(x)))  # @hidden
        return x + self.down(hidden)


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(6)
model = nn.Sequential(Layer(), Layer())
for layer in model:
    parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
smoothing = 1.0  # @smoothing
for step in range(3):
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))  # @data
    loss = nn.functional.huber_loss(model(x), x.flip(0), delta=smoothing)  # @forward
    loss.backward()  # @backward
    optimizer.step()  # @update
    optimizer.zero_grad()
dist.destroy_process_group()
