"""Time-outs that a program sets, and the end of ranks that wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpusim import DeadlockError, ReplicaError
from gpusim.torch.distributed import launch
from tests.oracles.machine_time import PATIENCE, until
from tests.torch.children import needs_linux
from tests.torch.turns_limits import SECOND, both, said, store


def limits(rank: int) -> list[str]:
    dist.init_process_group("gloo", timeout=SECOND)
    found = []
    if rank == 0:
        found.append(said(dist.barrier))
        found.append(said(lambda: dist.all_reduce(torch.ones(1))))
        group = dist.new_group([0], timeout=SECOND)
        found.append(said(lambda: dist.barrier(group)))
    return found


def limit_of_recv(rank: int) -> list[str]:
    dist.init_process_group("gloo", timeout=SECOND)
    if rank:
        return []
    one = torch.ones(1)
    return [said(lambda: dist.recv(one, 1)), said(lambda: dist.send(one, 1))]


def limit_of_wait(rank: int) -> list[str]:
    """A wait's own limit ends the wait, and not the call."""
    common, x = store(), torch.ones(1)
    if rank:
        common.wait(["go"])
        dist.all_reduce(x)
        return []
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    found = [said(lambda: work.wait(SECOND))]
    common.set("go", "")
    work.wait()
    return [*found, str(x.item())]


def limit_of_barrier(rank: int) -> list[str]:
    dist.init_process_group("gloo")
    return [said(lambda: dist.monitored_barrier(timeout=SECOND))] if rank != 1 else []


def limit_of_all(rank: int) -> list[str]:
    dist.init_process_group("gloo")
    wait: dict[str, Any] = {"timeout": SECOND, "wait_all_ranks": True}
    return [] if rank else [said(lambda: dist.monitored_barrier(**wait))]


def limit_of_root(rank: int) -> list[str]:
    """Nothing expires while a rank sleeps less; a rank that sleeps more comes too late."""
    dist.init_process_group("gloo")
    if rank == 1:
        time.sleep(0.01)
    first = said(lambda: dist.monitored_barrier(timeout=SECOND))
    if rank == 1:
        time.sleep(0.01)
        return [first]
    return [first, said(lambda: dist.monitored_barrier(timeout=timedelta(milliseconds=5)))]


def limit_of_store(rank: int) -> list[str]:
    common = store()
    found = [said(lambda: common.wait(["a", "b"], SECOND))]
    common.set_timeout(timedelta(seconds=2))
    return [*found, said(lambda: common.get("a")), said(lambda: common.queue_pop("q"))]


RECV = "RuntimeError: [gloo] Timed out waiting 1000ms for recv operation to complete"
CLOSED = "RuntimeError: Application timeout caused pair closure"
IN_VAIN = (
    "RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors while waiting "
    "for send/recv from rank 0. Please check rank 0 logs for faulty rank."
)
LIMITS: list[tuple[Callable[[int], list[str]], dict[int, list[str]]]] = [
    (limits, {0: [RECV, CLOSED, "nothing"]}),
    (limit_of_recv, {0: [RECV, CLOSED]}),
    (limit_of_wait, {0: ["RuntimeError: Operation timed out!", "3.0"]}),
    (
        limit_of_barrier,
        {
            0: ["RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 1000 ms"],
            2: [IN_VAIN],
        },
    ),
    (
        limit_of_all,
        {0: ["RuntimeError: [Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 1000 ms"]},
    ),
    (
        limit_of_root,
        {
            0: [
                "nothing",
                "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 5 ms",
            ],
            1: ["nothing"],
            2: ["nothing", IN_VAIN],
        },
    ),
    (
        limit_of_store,
        {
            rank: [
                "DistStoreError: wait timeout after 1000ms, keys: /default_pg/0//a, ",
                "DistStoreError: wait timeout after 2000ms, keys: /default_pg/0//a",
                "DistStoreError: wait timeout after 2000ms, keys: /default_pg/0//q",
            ]
            for rank in range(3)
        },
    ),
]


@both
def test_limits_that_a_program_sets_expire_in_its_rank(mode: dict[str, Any]) -> None:
    """With the words of gloo and of TCPStore."""
    if mode:
        joined = launch(lambda r: [_alone(p, r) for p, _ in LIMITS], 3, **mode)
        by_program = list(zip(*joined, strict=True))
    else:
        by_program = [tuple(launch(program, 3)) for program, _ in LIMITS]
    for (program, expected), found in zip(LIMITS, by_program, strict=True):
        for rank in range(3):
            texts = expected.get(rank, [])
            assert len(found[rank]) == len(texts), (program.__name__, rank, found[rank])
            for text, whole in zip(texts, found[rank], strict=True):
                assert whole.startswith(text), (program.__name__, rank, whole)


def _alone(program: Callable[[int], list[str]], rank: int) -> list[str]:
    """One of several programs in one launch."""
    found = program(rank)
    common = dist.distributed_c10d._get_default_store()
    ended = f"ended {program.__name__}"
    common.add(ended, 1)
    while common.add(ended, 0) < 3:
        time.sleep(0.001)
    dist.destroy_process_group()
    return found


@both
def test_an_uncaught_time_out_says_who_waited_for_what(mode: dict[str, Any]) -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo", timeout=SECOND)
        if rank == 0:
            dist.barrier()

    with pytest.raises(ReplicaError) as caught:
        launch(program, 3, **mode)
    assert caught.value.index == 0
    for text in (RECV[14:], "no rank can go on: rank 0 waits in barrier()", "1, 2 have returned"):
        assert text in str(caught.value)


@pytest.mark.parametrize("timeout", [None, timedelta(minutes=30)])
def test_without_a_limit_a_deadlock_is_one(timeout: timedelta | None) -> None:
    """Also with NCCL's, which ends the process and cannot be caught."""
    for backend, limit in (("gloo", timeout), ("nccl", timeout or SECOND)):

        def program(rank: int, backend: str = backend, limit: Any = limit) -> None:
            dist.init_process_group(backend, timeout=limit)
            if rank == 0:
                dist.barrier()

        with pytest.raises(DeadlockError, match="rank 0 waits in barrier"):
            launch(program, 2)


# The end


def test_an_error_does_not_wait_for_a_rank_that_is_blocked() -> None:
    read, write = os.pipe()

    def program(rank: int) -> None:
        if rank == 0:
            os.read(read, 1)
        raise KeyError("weights")

    try:
        with pytest.raises(ReplicaError, match="rank 1 raised KeyError"):
            launch(program, 2)
    finally:
        os.write(write, b"x")  # its thread ends
        os.close(write)


BLOCKED = """
import sys, time, torch.distributed as dist
dist.init_process_group("gloo")
print("ready", flush=True)
if dist.get_rank():
    dist.barrier()
elif sys.argv[1] == "sleep":
    time.sleep(1e6)
else:
    dist.TCPStore("127.0.0.1", 0, 1, True).get("never")
"""


@needs_linux
@pytest.mark.parametrize("options", [[], ["--processes"]], ids=["threads", "processes"])
@pytest.mark.parametrize("how", ["sleep", pytest.param("store", marks=pytest.mark.slow)])
def test_sigterm_ends_ranks_that_wait(options: list[str], how: str, tmp_path: Path) -> None:
    """The store's wait is in C++, which no exception reaches."""
    script = tmp_path / "blocked.py"
    script.write_text(BLOCKED)
    command = [sys.executable, "-W", "ignore", "-m", "gpusim", "torchrun", *options]
    output = tmp_path / "output"
    with output.open("w") as file:
        child = subprocess.Popen(
            [*command, "--nproc-per-node", "2", str(script), how],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            assert until(lambda: output.read_text().count("ready") == 2 or child.poll() is not None)
            child.send_signal(signal.SIGTERM)
            assert child.wait(PATIENCE) == 143
        finally:
            child.kill()
            child.wait()
    text = output.read_text()
    assert "terminated" in text
    assert "pmap" not in text
    assert "axis" not in text


@needs_linux
@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--processes"]], ids=["threads", "processes"])
def test_files_that_a_script_left_open_are_whole(options: list[str], tmp_path: Path) -> None:
    """Also one in a cycle, which the quick end of the command does not free."""
    script = tmp_path / "open.py"
    script.write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "file = open(f'out{dist.get_rank()}', 'w')\n"
        "cycle = [file]; cycle.append(cycle)\n"
        "file.write('text'); del file\n"
    )
    command = [sys.executable, "-W", "ignore", "-m", "gpusim", "torchrun", *options]
    subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)], check=True, cwd=tmp_path, timeout=PATIENCE
    )
    assert [(tmp_path / f"out{rank}").read_text() for rank in range(2)] == ["text"] * 2


ENDS = """
import atexit, gc, sys
atexit.register(lambda: print(len(gc.get_objects())))  # which is called last
from gpusim.tools.cli import main
sys.argv = ["gpusim", "torchrun", "--threads", "--nproc-per-node=3", sys.argv[1]]
sys.exit(main())
"""


@pytest.mark.slow
def test_the_commands_end_does_not_walk_through_what_ranks_have_left(tmp_path: Path) -> None:
    """H4: Python's end does so several times, which took minutes after the last line of output."""
    script = tmp_path / "many.py"
    script.write_text(
        "import sys\nsys.left = getattr(sys, 'left', []) + [[] for _ in range(300_000)]\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", ENDS, str(script)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=PATIENCE)
    assert int(done.stdout) < 300_000
