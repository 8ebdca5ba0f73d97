"""What runs in torch's own simulated groups and in gpusim: the table of docs/torch-simulators.md.

`python -m tests.torch.other_simulators` prints it. Each cell is a process of its own, as some hang:
`python -m tests.torch.other_simulators ENGINE PROGRAM` runs one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from tests.oracles.machine_time import blocked

ROOT = Path(__file__).parents[2]
RANKS = 4
LOOK = 0.25
"""Seconds between two looks at a program."""

LOOKS = 80
"""Looks in a row at which a program has done nothing, after which it counts as hanging."""


# Programs: each takes the rank, which LocalTensor gives as a symbolic number, and asserts values.


def value(rank: Any, size: int = 3) -> Tensor:
    """A tensor whose elements are the rank, from 1."""
    return torch.ones(size) * (rank + 1)


def check(found: Any, expected: Any) -> None:
    """AssertionError if a tensor, or one of LocalTensor's, differs from what is expected."""
    found = getattr(found, "wait", lambda: found)()  # of an asynchronous collective
    parts = getattr(found, "_local_tensors", {0: found}).values()
    for part in parts:
        wanted = torch.as_tensor(expected, dtype=part.dtype).expand_as(part)
        torch.testing.assert_close(part, wanted)


def all_reduce(rank: Any) -> None:
    x = value(rank)
    dist.all_reduce(x)
    check(x, 10.0)


def reduce(rank: Any) -> None:
    x = value(rank)
    dist.reduce(x, 1)
    if rank == 1:
        check(x, 10.0)


def send_recv(rank: Any) -> None:
    x = value(rank)
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x, 0)
        check(x, 1.0)


def uneven_all_to_all(rank: Any) -> None:
    """Rank r sends s + 1 rows to rank s."""
    out = torch.empty(RANKS * (int(rank) + 1))
    sizes = [s + 1 for s in range(RANKS)]
    dist.all_to_all_single(out, value(rank, 10), [int(rank) + 1] * RANKS, sizes)
    check(out, torch.arange(1.0, 5).repeat_interleave(int(rank) + 1))


def asynchronous_out_of_order(rank: Any) -> None:
    """Two groups of all ranks are used in another order by some."""
    groups = [dist.new_group(range(RANKS)) for _ in range(2)]
    tensors = [value(rank), value(rank) * 2]
    order = (0, 1) if rank % 2 == 0 else (1, 0)
    works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        work.wait()
    check(tensors[0], 10.0)
    check(tensors[1], 20.0)


def subgroup_all_gather(rank: Any) -> None:
    own, _ = dist.new_subgroups(2)
    parts = [torch.zeros(3) for _ in range(2)]
    dist.all_gather(parts, value(rank), group=own)
    first = 1.0 + 2 * (rank // 2)
    check(parts[0] - first, 0.0)
    check(parts[1] - first, 1.0)


def mismatched_calls(rank: Any) -> None:
    """One rank broadcasts where the others reduce: an error is right."""
    if rank == 2:
        dist.broadcast(value(rank), 0)
    else:
        dist.all_reduce(value(rank))


def deadlock(rank: Any) -> None:
    """One rank makes no call: an error is right."""
    if rank != 2:
        dist.all_reduce(value(rank))


def train(rank: Any, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """One step, whose mean gradient is that of all data in one place."""
    own = torch.Generator().manual_seed(0)  # threads share the global one
    data = torch.randn(RANKS, 2, 4, generator=own)
    plain = nn.Linear(4, 4, bias=False)
    nn.init.normal_(plain.weight, generator=own)
    expected = plain.weight.detach().clone()
    torch.func.functional_call(plain, {}, (data.flatten(0, 1),)).square().mean().backward()
    assert plain.weight.grad is not None
    expected -= 0.1 * plain.weight.grad
    plain.weight.grad = None
    model = wrap(nn.Sequential(plain))
    model(data.index_select(0, torch.as_tensor(rank).reshape(1))[0]).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    found = model.state_dict().popitem()[1]
    check(found.full_tensor() if hasattr(found, "full_tensor") else found.view(4, 4), expected)


def ddp(rank: Any) -> None:
    train(rank, nn.parallel.DistributedDataParallel)


def fsdp1(rank: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    train(rank, lambda model: FSDP(model, device_id=torch.device("cpu")))


def fsdp2(rank: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (RANKS,))
    train(rank, lambda model: fully_shard(model, mesh=mesh))


def tensor_parallel(rank: Any) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = dist.init_device_mesh("cpu", (RANKS,))
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    for parameter in model.parameters():
        parameter.data.copy_(torch.arange(parameter.numel()).sin().view_as(parameter))
    x = torch.arange(8.0).cos().view(2, 4)
    expected = model(x).detach()
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    check(model(x).detach(), expected)


def dropout_repeats(rank: Any) -> None:
    """Ranks draw from the global generator between collectives, and have a seed each."""
    seed = rank.item() if isinstance(rank, Tensor) else rank
    torch.manual_seed(seed)
    kept = []
    for _ in range(20):
        x = nn.functional.dropout(torch.ones(64), 0.5)
        kept.append(x.clone())
        dist.all_reduce(x)
    torch.manual_seed(seed)
    alone = [nn.functional.dropout(torch.ones(64), 0.5) for _ in range(20)]
    check(torch.stack(kept) - torch.stack(alone), 0.0)


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "send and recv": send_recv,
    "uneven all_to_all": uneven_all_to_all,
    "two groups, async, in another order": asynchronous_out_of_order,
    "all_gather on subgroups": subgroup_all_gather,
    "DDP": ddp,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "tensor parallelism": tensor_parallel,
    "dropout with a seed for each rank": dropout_repeats,
    "broadcast meets all_reduce": mismatched_calls,
    "a rank makes no call": deadlock,
}
WRONG = ("broadcast meets all_reduce", "a rank makes no call")


# Engines


def local_tensor(program: Callable[[Any], Any]) -> None:
    from torch.distributed._local_tensor import LocalTensorMode, local_tensor_mode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    with LocalTensorMode(RANKS):
        mode = local_tensor_mode()
        assert mode is not None
        program(mode.rank_map(lambda r: torch.tensor(r)) if hasattr(mode, "rank_map") else 0)


def threaded(program: Callable[[Any], Any]) -> None:
    from torch.testing._internal.distributed import multi_threaded_pg

    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store, errors = dist.HashStore(), []

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=RANKS, store=store)
            torch.autograd.set_multithreading_enabled(False)
            program(rank)
        except BaseException as error:
            errors.append(error)
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)

    ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    if errors:
        raise errors[0]


def fake(program: Callable[[Any], Any]) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=RANKS, store=FakeStore())
    program(1)


def ours(program: Callable[[Any], Any]) -> None:
    from gpusim.torch.distributed import launch

    def run(rank: int) -> None:
        dist.init_process_group()
        program(rank)

    launch(run, RANKS)


ENGINES = {"LocalTensor": local_tensor, "threaded": threaded, "fake": fake, "gpusim": ours}


def outcome(engine: str, name: str) -> str:
    """What one program does in a process of its own: a cell of the table."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.torch.other_simulators", engine, name]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors) as process,
    ):
        if blocked(process.pid, LOOKS, LOOK):
            process.kill()
            return "hangs"
        process.wait()
        errors.seek(0)
        last = (errors.read().strip().splitlines() or [""])[-1]
    print(f"{engine}, {name}: {process.returncode} {last[:120]}", file=sys.stderr, flush=True)
    if name in WRONG:
        if "No error" in last:
            return "no error"
        return "names the ranks" if "GPUSIM" in last else "error"
    if process.returncode == 0:
        return "yes"
    return "wrong values" if "AssertionError" in last else "error"


def table() -> str:
    """The table as Markdown."""
    cells = [(engine, name) for name in PROGRAMS for engine in ENGINES]
    with ThreadPoolExecutor(3) as pool:
        found = dict(zip(cells, pool.map(lambda cell: outcome(*cell), cells), strict=True))
    lines = ["| | " + " | ".join(ENGINES) + " |", "|---" * (len(ENGINES) + 1) + "|"]
    for name in PROGRAMS:
        row = [found[engine, name] for engine in ENGINES]
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines)


def main(engine: str, name: str) -> None:
    """Run one program; the last line on standard error says how it ended."""
    from gpusim import GpusimError

    try:
        ENGINES[engine](PROGRAMS[name])
    except BaseException as error:
        kind = "AssertionError" if isinstance(error, AssertionError) else type(error).__name__
        cause = error.__cause__
        if isinstance(cause, AssertionError):
            kind = "AssertionError"
        if name in WRONG and isinstance(error, GpusimError) and "rank" in str(error):
            kind = "GPUSIM " + kind
        print(f"\n{kind}: {' '.join(str(error).split())[:300]}", file=sys.stderr, flush=True)
        code = 1
    else:
        print("\nNo error", file=sys.stderr, flush=True)
        code = 0
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        main(*sys.argv[1:])
    else:
        print(table())
