"""A permanent world of torch.distributed over gloo: real processes, one for each rank.

`python -m tests.torch.gloo_ranks` reads folders, one a line, and answers each with the number of
ranks that have failed. FOLDER/cases.json lists cases: a program, its number of ranks, and its
arguments. The ranks write their tensors, and what they print, to FOLDER.

This process imports torch, forks a rank when a case first needs it, and has no threads itself. The
ranks live on: a case of n ranks makes a group of the first n, and destroys it. After a failure, and
for programs that leave something in their process, all ranks are made anew.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.tensor._random as dtensor_random

from tests.torch import dispatched_programs  # noqa: F401 - programs of its own
from tests.torch.distributed_programs import PROGRAMS
from tests.torch.random_calls import random_calls

ROOT = Path(__file__).parents[2]
# Programs that leave something in the process: plans of checkpoints, in classes of torch's.
ALONE = ("planned",)
#: All programs of the world; random calls have a test of their own.
KNOWN = {**PROGRAMS, "random_calls": random_calls}
Case = tuple[str, int, dict[str, Any]]
Found = list[dict[str, torch.Tensor]]  # by each rank, named


@functools.cache
def started() -> subprocess.Popen[str]:
    """The world's process; it ends with its input."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.torch.gloo_ranks"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def server() -> subprocess.Popen[str]:
    """The world of all tests of this process; a new one if a test that hung has ended it."""
    if started().poll() is not None:
        started.cache_clear()
    return started()


def gloo(cases: list[Case], folder: Path) -> list[Found]:
    """What the ranks of each case return in real processes."""
    (folder / "cases.json").write_text(json.dumps(cases))
    world = server()
    assert world.stdin is not None and world.stdout is not None
    print(folder, file=world.stdin, flush=True)
    answer = world.stdout.readline()
    if not answer:
        started.cache_clear()
    assert answer == "0\n", (answer, (folder / "printed").read_text()[-4000:])
    return [
        [torch.load(folder / f"{number}-{rank}.pt") for rank in range(ranks)]
        for number, (_, ranks, _) in enumerate(cases)
    ]


# In the ranks


@dataclass(frozen=True)
class State:
    """What a case may change in its process, as it is before the first one."""

    environment: dict[str, str]
    torch: torch.Tensor
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> State:
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
        return cls(dict(os.environ), *states)

    def restore(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)  # noqa: NPY002 - the global generator
        random.setstate(self.python)
        dtensor_random._rng_tracker = None
        torch.set_num_threads(1)


def live(rank: int, port: int, lines: TextIO, answers: TextIO) -> None:
    """One rank: read cases, and answer each with 0 or 1; first with the port of rank 0's store."""
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    print(store.port, file=answers, flush=True)
    before = State.now()
    genuine = dist.init_process_group
    for line in lines:
        mark, number, folder, (name, ranks, arguments) = json.loads(line)
        before.restore()
        own = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({key: str(value) for key, value in own.items()})

        def init(backend: str, mark: int = mark, ranks: int = ranks) -> None:
            meet = dist.PrefixStore(f"case {mark}", store)
            genuine(backend, store=meet, rank=rank, world_size=ranks)

        dist.init_process_group = init
        printed = os.open(Path(folder, "printed"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        os.close(printed)
        try:
            torch.save(KNOWN[name](**arguments), Path(folder, f"{number}-{rank}.pt"))
            dist.barrier()
            dist.destroy_process_group()
            print(0, file=answers, flush=True)
        except BaseException:
            traceback.print_exc()
            print(1, file=answers, flush=True)


# In the process that forks them


@dataclass
class Rank:
    pid: int
    lines: TextIO
    answers: TextIO


@dataclass
class Ranks:
    """The ranks that live; rank 0's store is where the others meet."""

    living: list[Rank] = field(default_factory=list)
    port: int = 0
    cases: int = 0  # so far: a prefix of the store for each

    def grow(self, count: int) -> None:
        while len(self.living) < count:
            to_rank, from_rank = os.pipe(), os.pipe()
            pid = os.fork()
            if not pid:
                for other in self.living:
                    other.lines.close()
                    other.answers.close()
                os.close(to_rank[1])
                os.close(from_rank[0])
                try:
                    with open(to_rank[0]) as lines, open(from_rank[1], "w") as answers:
                        live(len(self.living), self.port, lines, answers)
                finally:
                    os._exit(0)
            os.close(to_rank[0])
            os.close(from_rank[1])
            new = Rank(pid, open(to_rank[1], "w"), open(from_rank[0]))
            self.port = int(new.answers.readline())
            self.living.append(new)

    def run(self, number: int, case: Case, folder: Path) -> int:
        """How many ranks of a case have failed; a rank that has died is one."""
        name, ranks, _ = case
        if name in ALONE:
            self.end()
        self.grow(ranks)
        self.cases += 1
        line = json.dumps([self.cases, number, str(folder), case])
        for rank in self.living[:ranks]:
            print(line, file=rank.lines, flush=True)
        bad = 0
        for rank in self.living[:ranks]:
            if rank.answers.readline() != "0\n":
                bad += 1
                self.end()  # the others may wait for it
        if name in ALONE:
            self.end()
        return bad

    def end(self) -> None:
        for rank in self.living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
                os.waitpid(rank.pid, 0)
        self.living, self.port = [], 0


def main() -> None:
    for name in (
        "_dynamo",
        "distributed.checkpoint.state_dict",
        "distributed.fsdp",
        "distributed.optim",
        "distributed.pipelining",
        "distributed.tensor.parallel",
    ):
        importlib.import_module(f"torch.{name}")  # once, before the ranks are forked
    world = Ranks()
    for line in sys.stdin:
        folder = Path(line.rstrip("\n"))
        failed = 0
        for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
            bad = world.run(number, tuple(case), folder)
            if bad:
                with open(folder / "printed", "a") as printed:
                    print(f"case {number}, {case}: {bad} ranks failed", file=printed)
            failed += bad
        print(failed, flush=True)
    world.end()


if __name__ == "__main__":
    main()
