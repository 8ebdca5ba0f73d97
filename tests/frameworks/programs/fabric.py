"""Lightning Fabric: DDP, FSDP, or FSDP2 by tensor parallelism (ModelParallelStrategy)."""

import argparse
import os
from typing import Any

import digest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel
from torch.utils.data import DataLoader, TensorDataset


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan: dict[str, Any] = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    for part in model:
        parallel.parallelize_module(part, mesh["tensor_parallel"], plan)
        fully_shard(part, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["ddp", "fsdp", "model_parallel"], default="ddp")
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    world = int(os.environ["WORLD_SIZE"])
    strategy = {
        "ddp": DDPStrategy,
        "fsdp": lambda: FSDPStrategy(auto_wrap_policy={nn.Sequential}),
        "model_parallel": lambda: ModelParallelStrategy(shard, world // 2, 2),
    }[options.strategy]()
    digest.watch()
    accelerator = "cuda" if options.gpu else "cpu"
    fabric = Fabric(accelerator=accelerator, devices=world, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(8)
    model = fabric.setup_module(nn.Sequential(block(8), block(8)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    inputs = torch.randn(201, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.flip(1)), batch_size=4, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    state = {"model": model, "optimizer": optimizer}
    for access in (fabric.save, fabric.load):
        for step, (x, y) in enumerate(loader):
            with fabric.no_backward_sync(model, enabled=step % 3 == 0):
                loss = nn.functional.mse_loss(model(x), y)
                fabric.backward(loss)
            if step % 3:
                optimizer.step()
                optimizer.zero_grad()
        access("state", state)
        digest.model(model)
        digest.say("loss", fabric.all_reduce(loss.detach(), reduce_op="mean"))
        digest.say("losses", fabric.all_gather(loss.detach()))
    fabric.barrier()


if __name__ == "__main__":
    main()
