"""Files that ranks write and read: what orders them, and what does not."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint

from gpusim.errors import GpusimError
from gpusim.torch.distributed import launch
from gpusim.torch.distributed.checks import Check
from gpusim.torch.distributed.checks.files import analyse
from gpusim.torch.distributed.checks.findings import Finding
from gpusim.torch.distributed.checks.happens import _Replay
from gpusim.torch.distributed.checks.log import Log
from gpusim.torch.distributed.checks.opens import counts, mode_of


class Rank:
    """A rank's log that is made by hand; all ranks are in the group "w"."""

    def __init__(self, rank: int, size: int) -> None:
        self.log = Log(rank, size, groups={"w": list(range(size))})
        self.calls = 0

    def file(self, mode: str, path: str = "/f", line: int = 1) -> Rank:
        self.log.events.append(["file", mode, path, f"{mode}.py:{line}"])
        return self

    def post(self, operation: str = "all_reduce", number: int | None = 0, **about: Any) -> Rank:
        self.log.events.append(["post", self.calls, "w", number, operation, "c.py:1", about])
        self.calls += 1
        return self

    def done(self, id_: int = 0) -> Rank:
        self.log.events.append(["done", id_])
        return self

    def store(self, kind: str, when: int, key: str = "k") -> Rank:
        self.log.events.append([kind, key, when])
        return self


def races(*ranks: Rank) -> list[tuple[str, list[int]]]:
    return [(each.site, each.ranks) for each in analyse([rank.log for rank in ranks])]


def two() -> tuple[Rank, Rank]:
    return Rank(0, 2), Rank(1, 2)


def test_a_file_that_is_written_and_read() -> None:
    one, other = two()
    assert races(one.file("w"), other.file("r")) == [("r.py:1", [1])]


def test_a_collective_between() -> None:
    one, other = two()
    assert not races(one.file("w").post().done(), other.post().done().file("r"))


def test_a_collective_that_is_not_waited_for() -> None:
    one, other = two()
    assert races(one.file("w").post().done(), other.post().file("r").done())


def test_the_order_may_be_the_other_one() -> None:
    one, other = two()
    assert not races(one.post().done().file("w"), other.file("r").post().done())


@pytest.mark.parametrize(("root", "is_race"), [(0, False), (1, True)])
def test_a_broadcast_orders_what_its_root_did(root: int, is_race: bool) -> None:
    one, other = two()
    one.file("w").post("broadcast", root=root).done()
    other.post("broadcast", root=root).done().file("r")
    assert bool(races(one, other)) == is_race


@pytest.mark.parametrize(("root", "is_race"), [(1, False), (0, True)])
def test_a_gather_orders_what_its_root_does(root: int, is_race: bool) -> None:
    one, other = two()
    one.file("w").post("gather", root=root).done()
    other.post("gather", root=root).done().file("r")
    assert bool(races(one, other)) == is_race


def test_a_message_between() -> None:
    one, other = two()
    one.file("w").post("send", None, peer=1)
    other.post("recv", None, peer=0).done().file("r")
    assert not races(one, other)
    one, other = two()
    one.post("send", None, peer=1).done().file("w")
    assert races(one, other.post("recv", None, peer=0).done().file("r"))


def test_a_message_from_any_rank_between() -> None:
    one, other = two()
    one.file("w").post("send", None, peer=1)
    assert not races(one, other.post("recv", None).done().file("r"))


def test_a_key_of_the_store_between() -> None:
    one, other = two()
    assert not races(one.file("w").store("set", 1), other.store("got", 2).file("r"))
    one, other = two()
    assert races(one.store("set", 1).file("w"), other.store("got", 2).file("r"))
    one, other = two()
    assert races(one.file("w").store("set", 3), other.store("got", 2).file("r"))


def test_order_is_passed_on() -> None:
    ranks = [Rank(n, 3) for n in range(3)]
    ranks[0].file("w").post("send", None, peer=1)
    ranks[1].post("recv", None, peer=0).done().store("set", 1)
    ranks[2].store("got", 2).file("r")
    assert not races(*ranks)


@pytest.mark.parametrize("modes", ["aa", "uu", "mm", "xx", "rr"])
def test_accesses_that_do_not_conflict(modes: str) -> None:
    one, other = two()
    assert not races(one.file(modes[0]), other.file(modes[1]))


@pytest.mark.parametrize("modes", ["ww", "wa", "wr", "ur", "ar", "mr", "wu", "wm"])
def test_accesses_that_conflict(modes: str) -> None:
    one, other = two()
    assert races(one.file(modes[0]), other.file(modes[1]))


def test_a_rank_that_was_killed_holds_nothing_up() -> None:
    one, other = Rank(0, 3), Rank(1, 3)
    one.log.groups = other.log.groups = {"w": [0, 1, 2]}
    one.file("w").post().done()
    other.post().done().file("r").post("all_reduce", 1).done(1)
    assert not races(one, other)


def test_what_a_rank_sees_before_the_group_is_there_goes_first() -> None:
    """Simulated ranks make a group one after another, so that the times say something else."""
    ranks = [Rank(n, 3) for n in range(3)]
    for rank in ranks:
        late = 10 * rank.log.rank
        for number in range(3):
            rank.store("got", late + number, f"file /{number}")
        rank.log.events.append(["joined", "w", [0, 1, 2]])
        if late:
            rank.store("got", late + 4, "file /f").file("r").post().done()
        else:
            rank.store("set", 4, "file /f").file("w").post().done().store("set", 40, "file /f")
    assert races(*ranks) == [("r.py:1", [1]), ("r.py:1", [2])]


def test_long_logs_take_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    step = _Replay._step

    def counted(replay: Any, *args: Any, **named: Any) -> bool:
        nonlocal steps
        steps += 1
        return step(replay, *args, **named)

    monkeypatch.setattr(_Replay, "_step", counted)
    ranks = [Rank(n, 8) for n in range(8)]
    for rank in ranks:
        rank.file("w" if rank.log.rank == 0 else "a", "/g")
        for number in range(1000):
            rank.post("all_reduce", number).done(number)
    races(*ranks)
    assert steps <= 2 * sum(len(rank.log.events) for rank in ranks)


def test_modes_and_files() -> None:
    assert mode_of("w", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) == "w"
    assert mode_of("r+", os.O_RDWR) == "u"
    assert mode_of("a", os.O_WRONLY | os.O_CREAT | os.O_APPEND) == "a"
    assert mode_of(None, os.O_RDONLY) == "r"
    assert mode_of("x", os.O_WRONLY | os.O_CREAT | os.O_EXCL) == "x"
    assert counts("/data/model.pt")
    assert not any(map(counts, ["/proc/self/stat", "/a/site-packages/b.json", "/a/b.lock"]))


# Programs


def check(f: Callable[..., Any], ranks: int = 3, **named: Any) -> list[Finding]:
    own = Check()
    with tempfile.TemporaryDirectory() as folder:
        try:
            launch(f, ranks, [Path(folder)], check=own, **named)
        except GpusimError as error:  # the race is real: a file may not be there yet
            assert "FileNotFoundError" in str(error) or "EOFError" in str(error)
    return [each for each in own.findings if each.kind == "file-race"]


def saved(rank: int, folder: Path, order: str) -> None:
    dist.init_process_group("gloo")
    store = dist.PrefixStore("mine", dist.group.WORLD.get_group_store())
    path = folder / "model.pt"
    if rank == 0:
        torch.save({"weight": torch.ones(2)}, path)
        if order == "store":
            store.set("saved", "1")
        if order == "add":
            store.add("saved", 1)
    if order == "barrier":
        dist.barrier()
    elif order == "monitored":
        dist.monitored_barrier()
    elif order == "object":
        dist.broadcast_object_list([1], 0)
    elif order == "store":
        store.wait(["saved"])
    elif order == "add":
        while not store.add("saved", 0):
            time.sleep(0.01)
    torch.load(path)


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("order", ["barrier", "monitored", "object", "store", "add"])
def test_a_checkpoint_that_is_loaded_in_order(order: str, processes: bool) -> None:
    def program(rank: int, folder: Path) -> None:
        saved(rank, folder, order)

    assert not check(program, processes=processes)


@pytest.mark.parametrize("processes", [False, True])
def test_a_checkpoint_that_is_loaded_at_once(processes: bool) -> None:
    def program(rank: int, folder: Path) -> None:
        saved(rank, folder, "")

    (found,) = check(program, processes=processes)
    assert found.ranks == [1, 2]
    assert found.site.startswith(f"{__file__}:")
    assert "model.pt, which rank 0 writes" in found.text


def test_dcp_is_silent() -> None:
    def program(rank: int, folder: Path) -> None:
        dist.init_process_group("gloo")
        state = {"weight": torch.full((4,), float(rank)), "step": 1}
        for step in range(2):
            checkpoint.save(state, checkpoint_id=folder / f"step{step}")
            checkpoint.load(state, checkpoint_id=folder / f"step{step}")
        checkpoint.save(state, checkpoint_id=folder / "step0")

    assert not check(program)


def test_a_lock_orders_ranks() -> None:
    def program(rank: int, folder: Path) -> None:
        dist.init_process_group("gloo")
        with open(folder / "data.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "data.json").exists():
                (folder / "data.json").write_text("[1]")
            fcntl.flock(lock, fcntl.LOCK_UN)
        assert json.loads((folder / "data.json").read_text()) == [1]

    assert not check(program)


def test_a_file_that_says_that_another_is_there() -> None:
    def program(rank: int, folder: Path) -> None:
        dist.init_process_group("gloo")
        if rank == 0:
            np.save(folder / "data.npy", np.ones(3))
            (folder / "done").touch()
        while not (folder / "done").exists():
            time.sleep(0.01)
        np.load(folder / "data.npy")

    assert not check(program)


def test_a_file_that_is_there_need_not_be_whole() -> None:
    def program(rank: int, folder: Path) -> None:
        dist.init_process_group("gloo")
        if rank == 0:
            np.save(folder / "data.npy", np.ones(3))
        while not (folder / "data.npy").exists():
            time.sleep(0.01)
        np.load(folder / "data.npy")

    assert [each.ranks for each in check(program)] == [[1, 2]]


def test_a_file_that_is_renamed_is_whole() -> None:
    def program(rank: int, folder: Path) -> None:
        dist.init_process_group("gloo")
        if rank == 0:
            np.save(folder / "data.part.npy", np.ones(3))
            os.replace(folder / "data.part.npy", folder / "data.npy")
        while not (folder / "data.npy").exists():
            time.sleep(0.01)
        np.load(folder / "data.npy")

    assert not check(program)


def test_ranks_write_parts_of_one_file() -> None:
    def program(rank: int, folder: Path) -> None:
        dist.init_process_group("gloo")
        if rank == 0:
            np.lib.format.open_memmap(folder / "all.npy", "w+", np.float32, (3,))
        dist.barrier()
        np.load(folder / "all.npy", mmap_mode="r+")[rank] = rank
        with open(folder / "log.txt", "a") as file:
            file.write(f"{rank}\n")

    assert not check(program)


def test_a_thread_of_a_rank_writes() -> None:
    from concurrent.futures import ThreadPoolExecutor

    written = []  # which says so past what the check sees

    def program(rank: int, folder: Path) -> None:
        dist.init_process_group("gloo")
        if rank == 0:
            with ThreadPoolExecutor(1) as pool:
                written.append(pool.submit((folder / "a.json").write_text, "{}").result())
        else:
            while not written:
                time.sleep(0.01)
            (folder / "a.json").read_text()

    assert [each.ranks for each in check(program)] == [[1, 2]]


def test_what_is_written_before_the_group_is_there() -> None:
    def program(rank: int, folder: Path) -> None:
        if rank == 0:
            (folder / "a.json").write_text("{}")
        dist.init_process_group("gloo")
        (folder / "a.json").read_text()

    assert not check(program)
