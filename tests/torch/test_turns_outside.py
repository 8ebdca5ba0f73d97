"""Ranks that wait outside of collectives: in sleep, polls, stores and locks."""

from __future__ import annotations

import fcntl
import importlib
import mmap
import os
import queue
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpusim import DeadlockError, GpusimError
from gpusim.fallback.threads import cores
from gpusim.maps.clock import ROUNDS
from gpusim.torch.distributed import launch
from gpusim.torch.distributed.calls import outside
from gpusim.torch.distributed.runners.progress import work_of_process
from tests.oracles.machine_time import PATIENCE
from tests.torch.children import needs_linux
from tests.torch.turns_limits import PROCESSES, THREADS, both, store

FREE: dict[str, Any] = {"schedule": "free"}
FREELY = [pytest.param(FREE, id="free")]
if sys.platform == "linux":
    FREELY.append(pytest.param({**FREE, "processes": True}, id="free processes"))
modes = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(THREADS, id="threads"),
        pytest.param(FREE, id="free"),
        pytest.param(PROCESSES, id="processes", marks=needs_linux),
    ],
)


# Polls


def files_with_sleep(rank: int, folder: Path) -> None:
    (folder / str(rank)).touch()
    while len(os.listdir(folder)) < 3:
        time.sleep(0.001)


def files_without_sleep(rank: int, folder: Path) -> None:
    (folder / str(rank)).touch()
    while not all((folder / str(other)).exists() for other in range(3)):
        pass


def check_with_sleep(rank: int, folder: Path) -> None:
    common = store()
    if rank == 2:
        common.set("key", "value")
    while not common.check(["key"]):
        time.sleep(0.001)


def check_without_sleep(rank: int, folder: Path) -> None:
    common = store()
    if rank == 2:
        common.set("key", "value")
    while not common.check(["key"]):
        pass


def counters(rank: int, folder: Path) -> None:
    common = store()
    common.add("count", 1)
    while common.add("count", 0) < 3:
        pass


def swaps(rank: int, folder: Path) -> None:
    """A lock that ranks take by compare_set, which only its owner gives back."""
    common = store()
    while common.compare_set("lock", "", str(rank)) != str(rank).encode():
        pass
    time.sleep(0.001)
    common.delete_key("lock")


def works(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo")
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    while not work.is_completed():
        time.sleep(0.001)


POLLS = (
    files_with_sleep,
    files_without_sleep,
    check_with_sleep,
    check_without_sleep,
    counters,
    swaps,
    works,
)


@modes
def test_ranks_that_all_poll_in_vain_are_named(mode: dict[str, Any]) -> None:
    """Each could go on if another one did."""

    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        if rank == 2:
            return
        work = dist.irecv(torch.ones(1), 1 - rank)
        while not work.is_completed():
            pass

    with pytest.raises(DeadlockError, match="no rank can go on") as caught:
        launch(program, 3, **mode)
    said = str(caught.value)
    assert "rank 2 has returned" in said
    assert "recv from rank 1" in said or "recv from rank 0" in said


@pytest.mark.skipif(cores() < 2, reason="two ranks have to run at a time")
@pytest.mark.parametrize("mode", FREELY)
def test_a_rank_polls_as_long_as_others_compute(mode: dict[str, Any]) -> None:
    count = mmap.mmap(-1, 8)  # which processes share

    def program(rank: int) -> int:
        dist.init_process_group("gloo")
        x, asked = torch.full((1,), 1.0 + rank), 0
        if rank == 1:
            busy = threading.Lock()
            busy.acquire()
            while int.from_bytes(count[:], "little") <= 2 * ROUNDS:
                busy.acquire(timeout=0.001)  # as code of C computes, without Python's lock
            dist.send(x, 0)
            return 0
        work = dist.irecv(x, 1)
        while not work.is_completed():
            asked += 1
            count[:] = asked.to_bytes(8, "little")
        assert x.item() == 2
        return asked

    assert launch(program, 2, **mode)[0] > 2 * ROUNDS


@modes
def test_a_rank_that_polls_lets_others_run(mode: dict[str, Any], tmp_path: Path) -> None:
    def program(rank: int) -> None:
        for poll in POLLS:
            folder = tmp_path / poll.__name__
            folder.mkdir(exist_ok=True)
            poll(rank, folder)
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()

    launch(program, 3, **mode)


# Sleep


def test_sleepers_go_on_by_the_time_they_asked_for() -> None:
    """However long a rank computes before it sleeps: the order is that of the virtual time."""
    order: list[tuple[int, int]] = []

    def program(rank: int) -> None:
        end = time.perf_counter() + (0.02 if rank == 1 else 0)
        while time.perf_counter() < end:
            pass
        for step, length in enumerate((0.005, 0.02)):
            time.sleep(length / (rank + 1))
            order.append((step, rank))

    launch(program, 3)
    # Their times: 0.0017, 0.0083; 0.0025, 0.0125; 0.005, 0.025.
    assert order == [(0, 2), (0, 1), (0, 0), (1, 2), (1, 1), (1, 0)]


@modes
def test_a_sleep_lasts_as_long_as_was_asked(mode: dict[str, Any]) -> None:
    def program(rank: int) -> float:
        begin = time.perf_counter()
        time.sleep(0)
        time.sleep(0.02 + 0.01 * rank)
        return time.perf_counter() - begin

    assert all(took >= 0.02 + 0.01 * rank for rank, took in enumerate(launch(program, 3, **mode)))


def test_lengths_of_sleep_are_those_of_python() -> None:
    class Length:
        def __index__(self) -> int:
            return 0

    def program(rank: int) -> list[str]:
        said = []
        for length in (-1, "1", None, float("nan"), 1j, Length(), True * 0, 1e300):
            try:
                time.sleep(length)
                said.append("")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        return said

    assert launch(program, 1) == [program(0)]


# Waits


@needs_linux
def test_a_process_that_ends_while_its_work_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the thread that watches ranks ends, and the others wait for ever."""

    def ends(folder: str) -> list[str]:
        raise FileNotFoundError(folder)

    assert work_of_process(os.getpid())
    assert work_of_process(2**22 + 1) is None  # above the greatest number of a process
    monkeypatch.setattr(os, "listdir", ends)  # as Path.glob ends that has seen the folder before
    assert work_of_process(os.getpid()) is None


def tcp_store(rank: int, folder: Path, port: int) -> bytes:
    """All ranks wait in its constructor, and two of three in get."""
    own = dist.TCPStore("127.0.0.1", port, 3, is_master=rank == 0)
    if rank == 2:
        own.set("key", "value")
    value: bytes = own.get("key")
    own.add("done", 1)
    while rank == 0 and own.add("done", 0) < 3:  # the server lives as long as this rank
        time.sleep(0.001)
    return value


def file_store(rank: int, folder: Path, port: int) -> bytes:
    own = dist.PrefixStore("mine", dist.FileStore(str(folder / "store"), 3))
    if rank == 2:
        own.set("key", "value")
    own.wait(["key"])
    return bytes(own.get("key"))


def fifo(rank: int, folder: Path, port: int) -> bytes:
    """Rank 0 waits for a program that waits for rank 2."""
    dist.init_process_group("gloo")
    path = folder / "fifo"
    if rank == 0:
        os.mkfifo(path)
    dist.barrier()
    if rank == 0:
        return subprocess.run(["cat", str(path)], capture_output=True, check=True).stdout
    if rank == 2:
        path.write_bytes(b"value")
    return b"value"


def sockets(rank: int, folder: Path, port: int) -> bytes:
    name = str(folder / "socket")
    if rank == 0:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
            server.listen()
            other, _ = server.accept()
            with other:
                return other.recv(5)
    while rank == 2:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(name)
            except OSError:
                time.sleep(0.001)
                continue
            client.sendall(b"value")
        break
    return b"value"


@needs_linux
@both
@pytest.mark.parametrize("wait", [tcp_store, file_store, fifo, sockets])
def test_a_rank_that_waits_elsewhere_loses_its_turn(
    wait: Callable[..., bytes], mode: dict[str, Any], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert launch(lambda rank: wait(rank, tmp_path, port), 3, **mode) == [b"value"] * 3


@pytest.mark.parametrize("mode", [THREADS, FREE], ids=["threads", "free"])
def test_waits_for_threads_lose_the_turn(mode: dict[str, Any]) -> None:
    event, items, hash_store = threading.Event(), queue.Queue[int](), dist.HashStore()

    def program(rank: int) -> int:
        if rank == 2:
            hash_store.set("key", "value")
            items.put(5)
            event.set()
            return 5
        if rank == 1:
            helper = threading.Thread(target=event.wait)
            helper.start()
            helper.join()
            hash_store.get("key")
            return 5
        event.wait()
        return items.get()

    assert launch(program, 3, **mode) == [5] * 3


def test_a_rank_that_loses_its_turn_in_an_import_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for the module's lock, in the midst of their turn."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(0.001)\nvalue = 5\n")

    def program(rank: int) -> int:
        found: int = importlib.import_module("slow_module").value
        return found

    try:
        assert launch(program, 3) == [5] * 3
    finally:
        sys.modules.pop("slow_module", None)


@pytest.mark.parametrize("late", [False, True])
def test_locks_of_modules_are_waited_for_without_the_turn(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch.compile's, whose holder waits for a compiler of C++.

    Also of a module that is imported later. The lock is put back.
    """
    (tmp_path / "gpusim_locked.py").write_text("import threading\nlock = threading.RLock()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(outside.LOCKS, "gpusim_locked", "lock")
    if not late:
        importlib.import_module("gpusim_locked")

    def body(rank: int) -> list[int]:
        module: Any = importlib.import_module("gpusim_locked")
        dist.init_process_group()
        order = []
        for step in range(2):
            with module.lock, module.lock:
                subprocess.run([sys.executable, "-c", "pass"], check=True, timeout=PATIENCE)
                order.append(step)
        return order

    try:
        assert launch(body, 3) == [[0, 1]] * 3
        module: Any = sys.modules["gpusim_locked"]
        assert isinstance(module.lock, type(threading.RLock()))
    finally:
        sys.modules.pop("gpusim_locked", None)


FORKS_AND_SLEEPS = """
import os, sys, threading, time

def handler():  # as one that waits until a lock is free, or until other threads have ended
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.01)

os.register_at_fork(before=handler)  # before gpusim registers its own, and so called after them
from gpusim.torch.distributed import launch

def program(rank):
    child = os.fork()
    if not child:
        time.sleep(0.01)
        os._exit(7)
    return os.waitpid(child, 0)[1] >> 8

print(launch(program, 3, schedule=sys.argv[1]))
"""


@needs_linux
@pytest.mark.parametrize("schedule", ["turns", "free"])
def test_a_rank_keeps_its_turn_while_it_forks(schedule: str) -> None:
    """It holds the lock that keeps the generators whole; another rank may fork in its turn."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS_AND_SLEEPS, schedule],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.stdout == "[7, 7, 7]\n", done.stderr


def test_locks_of_torch_are_where_they_are_looked_for() -> None:
    for module, name in outside.LOCKS.items():
        lock = getattr(importlib.import_module(module), name)
        assert isinstance(lock, (type(threading.RLock()), type(threading.Lock())))


def test_what_belongs_to_a_rank_is_there_after_its_turn_was_taken(tmp_path: Path) -> None:
    """Random states, the folder, sys.argv and variables, though others ran in the midst."""
    read, write = os.pipe()
    folders = [tmp_path / str(rank) for rank in range(2)]
    for folder in folders:
        folder.mkdir()

    def program(rank: int) -> tuple[Any, ...]:
        random.seed(rank)
        torch.manual_seed(rank)
        os.chdir(folders[rank])
        sys.argv = [str(rank)]
        if rank == 0:
            os.read(read, 1)
        drawn = random.random(), torch.rand(1).item()
        if rank == 1:
            os.write(write, b"x")
        return Path.cwd(), sys.argv, drawn

    try:
        found = launch(program, 2)
    finally:
        os.close(read)
        os.close(write)
    for rank in range(2):
        generator = torch.Generator().manual_seed(rank)
        drawn = random.Random(rank).random(), torch.rand(1, generator=generator).item()
        assert found[rank] == (folders[rank], [str(rank)], drawn)


@needs_linux
@both
@pytest.mark.parametrize("name", ["flock", "lockf"])
def test_locks_of_files_exclude_ranks(name: str, mode: dict[str, Any], tmp_path: Path) -> None:
    """A process has those of lockf as a whole: ranks that share one would all have the lock."""
    path = tmp_path / "lines"

    def program(rank: int) -> bool:
        lock = getattr(fcntl, name)
        dist.init_process_group("gloo")
        with path.open("a") as file:
            if rank == 0:
                lock(file, fcntl.LOCK_EX)
            dist.barrier()
            refused = False
            if rank:
                try:
                    lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    refused = True
                dist.barrier()
                lock(file, fcntl.LOCK_EX)
            else:
                dist.barrier()
                time.sleep(0.01)
            file.write(f"{rank}\n")
            file.flush()
            lock(file, fcntl.LOCK_UN)
        return refused

    assert launch(program, 3, **mode) == [False, True, True]
    lines = path.read_text().split()
    assert lines[0] == "0"
    assert sorted(lines) == ["0", "1", "2"]


def test_rpc_is_refused_by_name() -> None:
    import torch.distributed.rpc as rpc

    def program(rank: int) -> None:
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)

    with pytest.raises(GpusimError, match=r"torch\.distributed\.rpc\.init_rpc of rank 0"):
        launch(program, 2)
