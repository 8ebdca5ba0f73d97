"""Ranks die, hang and are late at the call that a plan names."""

from __future__ import annotations

import atexit
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpusim.torch.distributed.faults.plans import parse
from gpusim.torch.distributed.launching import run_ranks
from gpusim.torch.distributed.runners.threads import environment_of

from .launches import Notes, launch

CALLS = 4


def sums(rank: int) -> list[float]:
    """Four calls, of which the last three are planned."""
    dist.init_process_group("gloo")
    x = torch.ones(3) * (rank + 1)
    for _ in range(CALLS):
        dist.all_reduce(x)
    dist.destroy_process_group()
    return x.tolist()


@pytest.mark.parametrize("call", [1, 2, CALLS])
@pytest.mark.parametrize(
    ("kind", "code", "error"),
    [
        ("exit", 1, "SystemExit"),
        ("exit code=7", 7, "SystemExit"),
        ("kill", -9, ""),
        ("raise", 1, "RuntimeError"),
    ],
)
def test_a_rank_ends_at_its_call(kind: str, code: int, error: str, call: int) -> None:
    kind, _, more = kind.partition(" ")
    plan = f"{kind} rank=1 call={call} {more}".strip()
    endings = launch(sums, 3, plan)
    dead = endings.ranks[1]
    assert endings.root is dead and endings.order[0] == 1
    assert (dead.code, dead.error, dead.calls, dead.by_agent) == (code, error, call - 1, False)
    assert endings.happened == parse(plan) and not endings.left and not endings.well
    if error == "RuntimeError":
        assert plan in dead.message and "all_reduce" in dead.traceback
    assert [each.code for each in endings.ranks] == [1, code, 1]


def test_without_a_fault_all_is_as_ever() -> None:
    endings = launch(sums, 3)
    assert endings.well and endings.root is None and endings.error is None
    assert endings.results == [[6 * 3.0 ** (CALLS - 1)] * 3] * 3
    assert [each.calls for each in endings.ranks] == [CALLS] * 3


@pytest.mark.parametrize("call", [1, CALLS])
def test_a_late_rank_gives_the_same_bits(call: int) -> None:
    endings = launch(sums, 3, f"late rank=1 call={call} seconds=1700")
    assert endings.well and endings.results == launch(sums, 3).results
    assert len(endings.happened) == 1


def test_a_fault_beyond_the_end_does_not_happen() -> None:
    plan = f"kill rank=0 call={CALLS + 1}"
    endings = launch(sums, 2, plan)
    assert endings.well and not endings.happened
    assert endings.left == ((parse(plan)[0], "the rank did not come to it"),)


def test_a_fault_of_another_start_does_not_happen() -> None:
    plan = "kill rank=0 call=1 attempt=1"
    assert launch(sums, 2, plan).well
    assert launch(sums, 2, plan, attempt=1).ranks[0].code == -9


def test_calls_count_over_all_groups_and_kinds(tmp_path: Path) -> None:
    notes = Notes(tmp_path)

    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        group = dist.new_group([0, 1])
        x = torch.ones(2)
        steps: list[Callable[[], Any]] = [
            lambda: dist.barrier(),
            lambda: dist.all_reduce(x, group=group),
            lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0),
            lambda: dist.broadcast_object_list([rank], 0),  # two calls: sizes, and bytes
            lambda: dist.monitored_barrier(),
        ]
        for number, step in enumerate(steps):
            step()
            notes.put(rank, str(number))

    for call, reached in ((1, 0), (2, 1), (3, 2), (4, 3), (5, 3), (6, 4)):
        for path in tmp_path.iterdir():
            path.unlink()
        endings = launch(program, 2, f"kill rank=0 call={call}")
        assert endings.ranks[0].code == -9
        assert notes.of(0) == [str(number) for number in range(reached)]
    assert launch(program, 2, "kill rank=0 call=7").well


@pytest.mark.parametrize(
    ("kind", "left"),
    [("exit", ["finally", "atexit"]), ("raise", ["finally", "atexit"]), ("kill", [])],
)
def test_what_runs_at_the_end_is_that_of_a_process(
    kind: str, left: list[str], tmp_path: Path
) -> None:
    notes = Notes(tmp_path)

    def program(rank: int) -> None:
        atexit.register(notes.put, rank, "atexit")
        dist.init_process_group("gloo")
        try:
            dist.barrier()
        finally:
            notes.put(rank, "finally")

    launch(program, 2, f"{kind} rank=0 call=1")
    assert notes.of(0) == left


def test_a_program_may_catch_what_is_raised_and_call_again() -> None:
    def program(rank: int) -> float:
        dist.init_process_group("gloo")
        x = torch.ones(1)
        try:
            dist.all_reduce(x)
        except RuntimeError:
            dist.all_reduce(x)
        return x.item()

    endings = launch(program, 3, "raise rank=1 call=1")
    assert endings.well and endings.results == [3.0, 3.0, 3.0] and len(endings.happened) == 1


def test_a_rank_that_hangs_is_ended_by_the_agent() -> None:
    endings = launch(sums, 3, "hang rank=1 call=2")
    assert endings.ranks[1].by_agent and endings.ranks[1].signal == "SIGTERM"
    assert [each.error for each in endings.ranks] == ["RuntimeError", "", "RuntimeError"]
    assert endings.root in (endings.ranks[0], endings.ranks[2])


def test_a_fault_in_the_midst_of_a_backward_pass_ends_the_rank_alike() -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()

    first = launch(program, 2)
    assert first.well
    last = first.ranks[0].calls
    for kind, code in (("exit code=5", 5), ("raise", 1), ("kill", -9)):
        kind, _, more = kind.partition(" ")
        endings = launch(program, 2, f"{kind} rank=0 call={last} {more}".strip())
        assert [each.code for each in endings.ranks] == [code, 1], kind
        assert "Connection closed by peer" in endings.ranks[1].message


def test_threads_cannot_die() -> None:
    environments = [environment_of(rank, 2, 2) for rank in range(2)]
    faults = parse("kill rank=0 call=1")
    with pytest.raises(ValueError, match=r"faults=\['kill rank=0 call=1'\]: ranks that are thr"):
        run_ranks(lambda rank: None, environments, None, "turns", faults=faults)
    with pytest.raises(ValueError, match="mortal=True: ranks that are threads cannot die"):
        run_ranks(lambda rank: None, environments, None, "turns", mortal=True)


WITHOUT = """
import sys
from gpusim.torch.distributed import launch
def f(rank):
    import torch.distributed as dist
    dist.init_process_group()
    dist.barrier()
    return [name for name in sys.modules if ".distributed.faults" in name]
print(launch(f, 2, processes=True), [name for name in sys.modules if ".faults" in name])
"""


def test_a_launch_without_faults_imports_nothing_of_them() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[[], []] []"
