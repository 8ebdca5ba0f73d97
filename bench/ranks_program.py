"""Steps on simulated ranks: python -m bench.ranks_program PARTICIPANT CASE RANKS.

It writes a line of JSON when its ranks have made a step: the sum of the absolute results of rank 0.
Then it reads numbers of steps from its standard input, and answers each with the seconds of a step.
The seconds are those of rank 0, from a barrier to a barrier, divided by the number.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ELEMENTS = 64 * 2**10  # of float32, 256 KiB
WIDTH, CLASSES, BATCH, RATE = 128, 10, 8, 0.1

Step = Callable[[], Any]
Body = Callable[[Step], None]


def all_reduce(rank: int) -> Step:
    """A sum of 256 KiB of float32."""
    x = torch.empty(ELEMENTS)

    def step() -> torch.Tensor:
        x.fill_(0.5)
        dist.all_reduce(x)
        return x

    return step


def _train(model: nn.Module, rank: int) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    y = torch.randint(CLASSES, (BATCH,), generator=generator)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        weight = next(model.parameters()).detach()
        local: torch.Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
        return local

    return step


def _model() -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, CLASSES),
    )
    generator = torch.Generator().manual_seed(0)  # free ranks share the global one
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    return model


def ddp(rank: int) -> Step:
    """A step of an MLP with three layers in DistributedDataParallel."""
    return _train(nn.parallel.DistributedDataParallel(_model()), rank)


def fsdp2(rank: int) -> Step:
    """The same under fully_shard, each layer for itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _train(model, rank)


CASES: dict[str, Callable[[int], Step]] = {"all_reduce": all_reduce, "ddp": ddp, "fsdp2": fsdp2}


def serve(make: Callable[[int], Step], rank: int, steps: list[int]) -> None:
    """Run steps as the standard input asks. `steps` is a list that all ranks share."""
    step = make(rank)
    result = step()
    if rank == 0:
        answer({"result": float(result.double().abs().sum())})
    while True:
        if rank == 0:
            steps[0] = int(sys.stdin.readline() or 0)
        dist.barrier()
        count = steps[0]  # before rank 0 asks again
        if count == 0:
            return
        start = time.perf_counter()
        for _ in range(count):
            step()
        dist.barrier()
        if rank == 0:
            answer({"seconds": (time.perf_counter() - start) / count})


def answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), file=ANSWERS, flush=True)


def gpusim(schedule: str, make: Callable[[int], Step], ranks: int) -> None:
    """Ranks of gpusim."""
    from gpusim.torch.distributed import launch

    steps = [0]

    def body(rank: int) -> None:
        dist.init_process_group("gloo")
        serve(make, rank, steps)

    launch(body, ranks, schedule=schedule)


def threaded(make: Callable[[int], Step], ranks: int) -> None:
    """PyTorch's own test group, whose ranks are threads."""
    from torch._C import _distributed_c10d
    from torch.testing._internal.distributed import multi_threaded_pg as threads

    torch.set_num_threads(1)  # of each rank, as gpusim has it
    bindings: Any = _distributed_c10d  # of which torch types a part
    bindings._set_thread_isolation_mode(True)
    threads._install_threaded_pg()
    store = dist.HashStore()
    steps = [0]

    def body(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            with torch.autograd.set_multithreading_enabled(False):
                serve(make, rank, steps)
        except BaseException as error:
            fail(error)

    each = [threading.Thread(target=body, args=(rank,)) for rank in range(ranks)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()


def local_tensor(make: Callable[[int], Step], ranks: int) -> None:
    """PyTorch's LocalTensor: one program, whose tensors hold those of all ranks."""
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    with LocalTensorMode(ranks):
        step = make(0)
        first = step()
        answer({"result": float(first._local_tensors[0].double().abs().sum())})
        while steps := int(sys.stdin.readline() or 0):
            start = time.perf_counter()
            for _ in range(steps):
                step()
            answer({"seconds": (time.perf_counter() - start) / steps})


def fail(error: BaseException) -> None:
    """Say why, and end at once, as other ranks may wait for ever."""
    lines = str(error).splitlines() or [""]
    answer({"problem": f"{type(error).__name__}: {lines[0][:160]}"})
    os._exit(1)


PARTICIPANTS: dict[str, Callable[[Callable[[int], Step], int], None]] = {
    "turns": partial(gpusim, "turns"),
    "free": partial(gpusim, "free"),
    "threaded": threaded,
    "LocalTensor": local_tensor,
}


def main(participant: str, case: str, ranks: str) -> None:
    try:
        PARTICIPANTS[participant](CASES[case], int(ranks))
    except BaseException as error:
        fail(error)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    ANSWERS = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        main(*sys.argv[1:])
