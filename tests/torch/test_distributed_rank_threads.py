"""Threads that ranks start: they belong to the rank for questions, and call no collectives."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor

import gpusim
from gpusim import GpusimError, ReplicaError, lax
from gpusim.tools.cli import main
from gpusim.torch.distributed import launch
from tests.oracles.machine_time import PATIENCE
from tests.torch.distributed_programs import start

KINDS = [False, *([True] if sys.platform == "linux" else [])]
POOL = ThreadPoolExecutor(max_workers=1)
"""As a library has it: of all ranks."""


def in_thread(function: Callable[[], Any]) -> Any:
    """The result or the exception of a function in a new thread, of a thread of this one."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    def outer() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    thread = threading.Thread(target=outer)
    thread.start()
    thread.join(PATIENCE)
    return found[0]


def answers() -> tuple[Any, ...]:
    return (
        dist.is_initialized(),
        dist.get_rank(),
        dist.get_world_size(),
        os.environ["RANK"],
        dist.get_process_group_ranks(dist.group.WORLD),
    )


@pytest.mark.parametrize("processes", KINDS)
def test_a_thread_has_the_answers_of_its_rank(processes: bool) -> None:
    def program(rank: int) -> list[Any]:
        start()
        pool = ThreadPoolExecutor(1) if processes else POOL
        found = [in_thread(answers), pool.submit(answers).result(PATIENCE)]
        dist.barrier()
        with ThreadPoolExecutor(2) as pool:
            found += pool.map(lambda _: answers(), range(3))
        found.append(gpusim.pmap(lambda x: lax.psum(x, "i"), "i")(np.ones(2))[0].item())
        return found

    POOL.submit(int).result()  # its thread is the process's
    for rank, found in enumerate(launch(program, 2, processes=processes)):
        assert found == [(True, rank, 2, str(rank), [0, 1])] * 5 + [2]
    assert not dist.is_initialized()
    assert not in_thread(dist.is_initialized) and "RANK" not in in_thread(lambda: dict(os.environ))


@pytest.mark.parametrize("processes", KINDS)
def test_collectives_in_a_thread_are_errors_that_change_nothing(processes: bool) -> None:
    """Also those of DTensor, which C++ calls by the group's name."""

    def program(rank: int) -> list[str]:
        start()
        mesh = dist.init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        x = torch.ones(3)
        work = dist.irecv(x, 1) if rank == 0 else None
        calls: list[Callable[[], Any]] = [
            lambda: dist.all_reduce(torch.ones(3)),
            lambda: dist.broadcast(torch.ones(3), 0),
            lambda: dist.send(torch.ones(3), 1 - rank),
            lambda: dist.barrier(),
            lambda: tensor.full_tensor(),
            lambda: dist.new_group([0, 1]),
            *([work.wait, work.is_completed] if work is not None else []),
        ]
        found = [in_thread(call) for call in calls]
        for each in found:
            assert isinstance(each, GpusimError), repr(each)
        dist.barrier()
        if work is None:
            dist.send(x + 1, 0)
        else:
            work.wait()
        assert x.tolist() == [2.0 - rank] * 3
        assert tensor.full_tensor().tolist() == [
            0.0,
            1.0,
            2.0,
            3.0,
        ]
        return [str(each) for each in found]

    for rank, texts in enumerate(launch(program, 2, processes=processes, reduction="ring")):
        names = ["all_reduce", "broadcast", "send", "barrier", "all_gather"]
        for name, text in zip(names, texts, strict=False):
            assert text == (
                f"{name} of rank {rank} was called from a thread that the rank started; "
                "ranks call collectives from their own thread"
            )
        for text in texts:
            assert "a thread that the rank started" in text


@pytest.mark.parametrize("processes", KINDS)
def test_async_save_is_an_error_and_writes_nothing(processes: bool, tmp_path: Path) -> None:
    """Whether or not the program asks for its result."""

    def program(rank: int) -> None:
        start()
        mesh = dist.init_device_mesh("cpu", (2,))
        state = {"x": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}
        dcp.async_save(state, checkpoint_id=tmp_path / "checkpoint")

    said = "async_save of rank . calls .* from a thread that the rank started; .*own thread"
    with pytest.raises(GpusimError, match=said) as caught:
        launch(program, 2, processes=processes)
    assert "own thread; use torch.distributed.checkpoint.save" in str(caught.value)
    assert not isinstance(caught.value, ReplicaError)
    assert not (tmp_path / "checkpoint" / ".metadata").exists()


def test_async_save_of_one_rank_alone(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        start()
        state = {"x": torch.full((2,), float(rank))}
        future: Any = dcp.async_save(state, checkpoint_id=tmp_path / str(rank), no_dist=True)
        future.result(PATIENCE)
        dcp.load(state, checkpoint_id=tmp_path / str(rank), no_dist=True)
        assert state["x"].tolist() == [float(rank)] * 2

    launch(program, 2)


def test_a_thread_that_outlives_its_rank_is_told_so() -> None:
    """torch would take it for a program without ranks."""
    ended, found = threading.Event(), []

    def ask() -> None:
        ended.wait(PATIENCE)
        try:
            dist.is_initialized()
        except GpusimError as error:
            found.append(str(error))

    def program(rank: int) -> None:
        start()
        if rank == 0:
            threads.append(threading.Thread(target=ask))
            threads[0].start()
            return
        while launched[0].record is not None:
            dist.distributed_c10d._world.group_count += 0
        ended.set()
        threads[0].join(PATIENCE)

    from gpusim.torch.distributed.own.threads import current_rank

    threads: list[threading.Thread] = []
    launched: list[Any] = []

    def noted(rank: int) -> None:
        if rank == 0:
            launched.append(current_rank())
        program(rank)

    launch(noted, 2)
    assert found == [
        "a thread that rank 0 started used torch.distributed after the rank's function had "
        "returned; join the thread in the rank"
    ]


@pytest.mark.parametrize("more", [[] if processes else ["--threads"] for processes in KINDS])
def test_the_output_of_a_thread_has_the_tag_of_its_rank(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    path = tmp_path / "train.py"
    path.write_text(
        "import threading\nthread = threading.Thread(target=lambda: print('x', end=''))\n"
        "thread.start()\nthread.join()\n"
    )
    assert main(["torchrun", "--nproc-per-node", "2", *more, str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == ["[rank0]: x", "[rank1]: x"]


def test_callbacks_of_a_pool_of_all_ranks_belong_to_the_rank_that_adds_them() -> None:
    def program(rank: int) -> list[Any]:
        start()
        found: list[Any] = []
        called = threading.Event()

        def note(_: Any) -> None:
            found.extend([dist.get_rank(), os.environ["RANK"]])
            called.set()

        with ThreadPoolExecutor(1) as own:
            for pool in (POOL, own):
                called.clear()
                pool.submit(time.sleep, 0.05).add_done_callback(note)
                assert called.wait(PATIENCE)
        done = POOL.submit(int)
        done.result(PATIENCE)
        done.add_done_callback(note)  # here, at once
        dist.barrier()  # whose group this thread still has
        return found

    for schedule in ("turns", "free"):
        found = launch(program, 3, schedule=schedule)
        assert found == [[rank, str(rank)] * 3 for rank in range(3)]


def test_threads_that_have_ended_are_freed_at_once() -> None:
    class Loader(threading.Thread):
        def run(self) -> None:
            self.ran = True

    freed: list[bool] = []

    def program(rank: int) -> None:
        thread = Loader()
        thread.start()
        thread.join()
        assert thread.ran
        assigned = threading.Thread()
        run = lambda: None  # noqa: E731  # an attribute, as of a subclass
        assigned.run = run
        assigned.start()
        assigned.join()
        assert assigned.run is run
        reference = weakref.ref(thread)
        del thread
        freed.append(reference() is None)

    gc.disable()
    try:
        launch(program, 2)
    finally:
        gc.enable()
    assert freed == [True, True]


@pytest.mark.own_process  # threads of gloo's may stay until the group is collected
def test_a_thread_that_outlives_its_launch_leaves_the_process_its_groups(tmp_path: Path) -> None:
    ended, threads = threading.Event(), []

    def program(rank: int) -> None:
        start()
        if rank == 0:
            threads.append(threading.Thread(target=ended.wait, args=(PATIENCE,)))
            threads[0].start()

    launch(program, 2)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ended.set()
        threads[0].join()
        total = functional_collectives.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        assert total.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()
