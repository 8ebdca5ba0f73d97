# run: --ranks 2 --check
"""pytorch/pytorch#98281: FSDP leaves out the parameters that it is told to ignore; they are trained
with the gradients of their rank."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Rotated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.rotation = nn.Parameter(torch.eye(width))
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x @ self.rotation)))


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Rotated(8)
    ignored = {model.rotation}
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        x = torch.randn(6, 8, generator=data)
        optimizer.zero_grad()
        (model(x) - x.flip(-1)).square().mean().backward()
        if "--fixed" in sys.argv:
            for parameter in ignored:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()  # finds: gradient-not-reduced on all
    dist.destroy_process_group()


main()
