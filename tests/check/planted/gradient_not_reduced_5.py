# run: --ranks 2 --check
"""FSDP2 with gradient accumulation that grows: the reduction is turned off for all micro-batches
but the last, and is not turned on again for it."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def loss_of(model, generator):
    x = torch.randn(4, 8, generator=generator)
    return nn.functional.mse_loss(model(x), x.cumsum(-1))


def accumulate(model, generator, micro_batches, fixed):
    for i in range(micro_batches):
        if i + 1 < micro_batches:
            model.set_requires_gradient_sync(False)
        elif fixed:
            model.set_requires_gradient_sync(True)
        (loss_of(model, generator) / micro_batches).backward()


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for micro_batches in (1, 1, 2, 4):
        optimizer.zero_grad(set_to_none=False)
        accumulate(model, generator, micro_batches, fixed="--fixed" in sys.argv)
        optimizer.step()  # finds: gradient-not-reduced on all
    dist.destroy_process_group()


main()
