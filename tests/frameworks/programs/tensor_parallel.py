"""Tensor and sequence parallelism by DTensor's plans and loss_parallel, alone or with FSDP2."""

import argparse

import digest
import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def plan(layers: int) -> dict[str, object]:
    """Activations are sharded over the sequence between attention and perceptron."""
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    styles: dict[str, object] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for n in range(layers):
        styles |= {f"blocks.{n}.{name}": SequenceParallel() for name in ("norm1", "norm2")}
        styles |= {f"blocks.{n}.{name}": gather for name in ("attention", "perceptron")}
        for name in ("attention.q", "attention.k", "attention.v", "perceptron.up"):
            styles[f"blocks.{n}.{name}"] = ColwiseParallel()
        for name in ("attention.out", "perceptron.down"):
            styles[f"blocks.{n}.{name}"] = RowwiseParallel(output_layouts=Shard(1))
    return styles


def parallel(model: tiny.Decoder, tp: int) -> tuple[nn.Module, int]:
    """Return the sharded model, and this rank's number among the copies of the data."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], plan(len(model.blocks)))
    if ranks > tp:
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return model, mesh.get_local_rank("data")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    options = parser.parse_args()
    digest.watch()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, data = parallel(tiny.Decoder(heads=8, width=64), options.tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    for step in range(10):
        inputs, targets = tiny.text(step * 100 + data, batch=2)
        with loss_parallel():
            loss = tiny.loss(model(inputs), targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    digest.say("loss", loss.full_tensor() if isinstance(loss, DTensor) else loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
