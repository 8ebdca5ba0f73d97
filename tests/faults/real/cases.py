"""Calls of torch.distributed around a death: the same code on real and on simulated ranks.

It imports torch alone, and records what each rank sees as text.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["KINDS", "PRELUDE", "Case", "die", "outcome", "read", "watch"]

PRELUDE = 2
"""Calls of each rank before the one at which the fault comes."""

TIMEOUT = 3
"""Seconds of the groups' limit."""

ELEMENTS = 8


@dataclass(frozen=True)
class Case:
    """One kind of call at which one rank dies.

    **Attributes**: `how` is exit, kill, raise or hang; `deferred` has the call made with
    async_op=True and its handle asked for.
    """

    ranks: int
    kind: str
    dead: int
    how: str = "kill"
    deferred: bool = False

    def __str__(self) -> str:
        return (
            f"{self.kind}{' deferred' if self.deferred else ''}, rank {self.dead} of "
            f"{self.ranks}: {self.how}"
        )


def calls_of(rank: int, ranks: int) -> dict[str, Callable[..., Any]]:
    """By name: the calls; collectives on tensors take async_op."""
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    limit = datetime.timedelta(seconds=2)

    def one(elements: int = ELEMENTS) -> torch.Tensor:
        return torch.full((elements,), float(rank + 1))

    def several() -> list[torch.Tensor]:
        return [one() for _ in range(ranks)]

    def ring() -> None:
        if rank % 2 == 0:
            dist.send(one(), after)
            dist.recv(one(), before)
        else:
            dist.recv(one(), before)
            dist.send(one(), after)

    def batch() -> None:
        operations = [
            dist.P2POp(dist.isend, one(), after),
            dist.P2POp(dist.irecv, one(), before),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def at(root: int, value: Any) -> Any:
        return value if rank == root else None

    found: dict[str, Callable[..., Any]] = {
        "all_reduce": lambda **more: dist.all_reduce(one(), **more),
        "all_gather": lambda **more: dist.all_gather(several(), one(), **more),
        "all_gather_into_tensor": lambda **more: dist.all_gather_into_tensor(
            one(ELEMENTS * ranks), one(), **more
        ),
        "reduce_scatter": lambda **more: dist.reduce_scatter(one(), several(), **more),
        "reduce_scatter_tensor": lambda **more: dist.reduce_scatter_tensor(
            one(), one(ELEMENTS * ranks), **more
        ),
        "all_to_all": lambda **more: dist.all_to_all(several(), several(), **more),
        "all_to_all_single": lambda **more: dist.all_to_all_single(
            one(ELEMENTS * ranks), one(ELEMENTS * ranks), **more
        ),
        "barrier": lambda **more: dist.barrier(**more),
        "all_gather_object": lambda: dist.all_gather_object([None] * ranks, rank),
        "gather_object": lambda: dist.gather_object(rank, at(0, [None] * ranks), dst=0),
        "broadcast_object_list": lambda: dist.broadcast_object_list([rank], 0),
        "scatter_object_list": lambda: dist.scatter_object_list(
            [None], at(0, list(range(ranks))), src=0
        ),
        "monitored_barrier": lambda: dist.monitored_barrier(timeout=limit),
        "monitored_barrier_all": lambda: dist.monitored_barrier(timeout=limit, wait_all_ranks=True),
        "ring": ring,
        "batch_isend_irecv": batch,
    }
    for root in range(2):
        rooted: dict[str, Callable[..., Any]] = {
            "broadcast": lambda root=root, **more: dist.broadcast(one(), root, **more),
            "reduce": lambda root=root, **more: dist.reduce(one(), root, **more),
            "gather": lambda root=root, **more: dist.gather(
                one(), at(root, several()), dst=root, **more
            ),
            "scatter": lambda root=root, **more: dist.scatter(
                one(), at(root, several()), src=root, **more
            ),
        }
        found.update((f"{name} {root}", call) for name, call in rooted.items())
    return found


KINDS = tuple(calls_of(0, 2))

#: Kinds whose calls take async_op.
DEFERRED = tuple(
    kind
    for kind in KINDS
    if not kind.endswith(("_object", "_list"))
    and "monitored" not in kind
    and "ring" not in kind
    and "batch" not in kind
)


def die(how: str, code: int = 3) -> None:
    """End this process, as a fault does."""
    if how == "exit":
        os._exit(code)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise RuntimeError("the fault")
    if how == "leave":
        sys.exit(0)
    if how == "hang":
        while True:
            time.sleep(60)


PLACES = (
    (r"/\S*/gloo/gloo/", "gloo/"),
    (r"\.cc:\d+\]", ".cc:N]"),
    (r"\[[0-9a-f:.]*\]:\d+", "[ADDRESS]"),
)
"""What differs from run to run and from build to build: paths, lines, addresses."""


def outcome(action: Callable[[], object]) -> str:
    """`fine`, a value of Python, or the exception: type and text without addresses."""
    try:
        value = action()
    except Exception as error:
        text = str(error)
        for pattern, name in PLACES:
            text = re.sub(pattern, name, text)
        return f"{type(error).__module__}.{type(error).__qualname__}: {text}"
    return str(value) if isinstance(value, bool) else "fine"


class Log(dict[str, str]):
    """What a rank sees, by label, in order; each line goes to a file at once."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def __setitem__(self, label: str, seen: str) -> None:
        super().__setitem__(label, seen)
        with open(self.path, "a") as file:
            file.write(json.dumps([label, seen]) + "\n")


def watch(
    rank: int,
    case: Case,
    folder: str,
    begin: Callable[[], object],
    fault: Callable[[], object],
) -> None:
    """Write what a rank sees to a file of the folder.

    `begin` makes the group. `fault` is called before the call: it ends a real rank that dies. The
    call of a simulated one ends it, by the plan: what that raises is not caught.
    """
    seen = Log(f"{folder}/{rank}.jsonl")
    begin()
    living = [each for each in range(case.ranks) if each != case.dead]
    others = dist.new_group(living) if len(living) > 1 else None
    for _ in range(PRELUDE):
        dist.all_reduce(torch.ones(4))
    call = calls_of(rank, case.ranks)[case.kind]
    fault()
    if rank == case.dead:
        call()
        raise AssertionError(f"rank {rank} outlives its fault")
    if case.deferred:
        works: list[Any] = []
        seen["posted"] = outcome(lambda: works.append(call(async_op=True)))
        for work in works:
            seen["wait"] = outcome(work.wait)
            seen["is_completed"] = outcome(work.is_completed)
            seen["is_success"] = outcome(work.is_success)
            seen["exception"] = outcome(lambda work=work: raised(work.exception()))
            seen["wait again"] = outcome(work.wait)
    else:
        seen["call"] = outcome(call)
    seen["again"] = outcome(call)
    seen["all_reduce"] = outcome(lambda: dist.all_reduce(torch.ones(4)))
    if others is not None:
        seen["others"] = outcome(lambda: dist.all_reduce(torch.ones(4), group=others))


def read(folder: str, rank: int) -> dict[str, str]:
    """What a rank has written."""
    path = Path(folder, f"{rank}.jsonl")
    return dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {}


def raised(error: BaseException | None) -> None:
    """Raise the exception that a handle tells of."""
    if error is not None:
        raise error
