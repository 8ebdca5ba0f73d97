"""A training program with one planted difference, on simulated ranks or real gloo processes.

`python -m tests.tools.planted FOLDER PLANT ...` records gloo's runs into FOLDER/PLANT.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

RANKS = 4
STEPS = 3
PLANTS = (
    "none seed late-seed split missing doubled doubled-line bucket input-cast metric-cast epsilon "
    "decay bfloat16 sharded cut"
).split()


SHARDED = ("sharded-none", "sharded-seed", "sharded-table", "sharded-message")


def program(plant: str) -> None:
    """The program in which something is planted."""
    (train_sharded if plant in SHARDED else train)(plant)


def train(plant: str) -> None:
    """Three steps of DDP, with a gradient norm, a metric and an exchange in each."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24))
    if plant == "bfloat16":
        model = model.bfloat16()
    megabytes = 0.01 if plant == "bucket" else 0.002
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=megabytes)
    decay = 0.02 if plant == "decay" else 0.01
    epsilon = 1e-6 if plant == "epsilon" else 1e-8
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, eps=epsilon, weight_decay=decay)
    draws = torch.Generator().manual_seed(99 if plant == "seed" and rank == 1 else rank)
    for step in range(STEPS):
        if plant == "late-seed" and step == 1 and rank == 2:
            draws.manual_seed(99)
        x = torch.randn(6, 24, generator=draws)
        if plant == "input-cast" and step == 1:
            x = x.bfloat16().float()
        optimizer.zero_grad()
        x = x.to(next(model.parameters()).dtype)
        y = ddp(x)  # forward
        loss = F.mse_loss(y.float(), x.float().roll(1, 1))
        loss.backward()  # backward
        norm = torch.stack([p.grad.float().norm() ** 2 for p in model.parameters()])
        if not (plant == "missing" and step == 1):
            for _ in range(1 + (plant == "doubled" and step == 1)):
                dist.all_reduce(norm)  # norm
        if plant == "doubled-line" and step == 1:
            dist.all_reduce(norm)  # again
        optimizer.step()
        metric = loss.detach().reshape(1)
        if plant == "metric-cast" and step == 1:
            metric = metric.bfloat16()
        dist.all_reduce(metric)  # metric
        sent = torch.arange(2.0 * size) + 100 * rank
        splits, parts = [2] * size, [2] * size
        if plant == "split" and step == 1:
            splits = [1, 3, *[2] * (size - 2)]
            parts = [splits[rank]] * size
        dist.all_to_all_single(torch.empty(sum(parts)), sent, parts, splits)  # exchange
        flat = torch.full((40,), 0.1 * rank)
        for part in flat.chunk(2 if plant == "cut" and step == 1 else 1):
            dist.all_reduce(part)  # cut
        if plant == "sharded":
            wide = torch.randn(40 * size, generator=draws)
            dist.reduce_scatter_tensor(torch.empty(40), wide)  # shards


def train_sharded(plant: str) -> None:
    """Two steps of FSDP2 over tensor-parallel layers; then messages, waited for in several ways."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.distributed.tensor.placement_types import Replicate, Shard

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "model"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 12))
    parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draws = torch.Generator().manual_seed(rank // 2)
    for step in range(2):
        x = torch.randn(5, 12, generator=draws)
        if plant == "sharded-seed" and step == 1 and rank >= 2:
            x = x + 1
        y = model(x)  # sharded forward
        (y * y).mean().backward()  # sharded backward
        optimizer.step()
        optimizer.zero_grad()
    table = distribute_tensor(torch.arange(24.0).reshape(4, 6) + 1, mesh["model"], [Shard(0)])
    scale = 0.3 if plant == "sharded-table" and rank == 3 else 0.1
    whole = (table.to_local() * scale).sum(0)
    from torch.distributed.tensor import DTensor, Partial

    DTensor.from_local(whole, mesh["model"], [Partial()]).redistribute(  # placement
        mesh["model"], [Replicate()]
    ).to_local().sum()
    after, before = (rank + 1) % size, (rank - 1) % size
    sent = torch.arange(6.0) + rank + (plant == "sharded-message" and rank == 1)
    received = torch.zeros(6)
    works = [dist.isend(sent, after), dist.irecv(received, before)]  # message
    for work in works:
        work.wait()
    received.mul_(2)  # the record has what was received, not this
    if rank % 2:
        dist.send(received, before)
    else:
        dist.recv(received, after)  # answer
    requests = [dist.P2POp(dist.isend, received, after), dist.P2POp(dist.irecv, sent, before)]
    for work in dist.batch_isend_irecv(requests):
        work.wait()


def run_rank(folder: Path, plant: str, rank: int) -> None:
    """One rank of a real run, in its own process."""
    from gpusim.recording.torch_hook import TorchRecording

    genuine: Any = dist.init_process_group
    meet = f"file://{folder}/meet-{plant}"

    def init(backend: str) -> None:
        genuine(backend, init_method=meet, rank=rank, world_size=RANKS)

    dist.init_process_group = init
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(RANKS)})
    torch.set_num_threads(1)
    with TorchRecording(folder / plant, arrays=range(10_000)):
        program(plant)
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path, plants: list[str]) -> int:
    """Fork the ranks of each plant; how many have failed."""
    import torch._dynamo  # noqa: F401 - once, before the ranks are forked

    failed = 0
    for plant in plants:
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if not child:
                try:
                    run_rank(folder, plant, rank)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        failed += sum(os.waitpid(child, 0)[1] != 0 for child in children)
    return min(failed, 99)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
