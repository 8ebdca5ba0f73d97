"""Ranks on several instances: the bits of threads, and what ends all instances."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gpusim import (
    CollectiveMismatchError,
    DeadlockError,
    GpusimError,
    InstanceError,
    ReplicaError,
    World,
)
from gpusim.runtime.engines import Buffer
from gpusim.torch.distributed import FoldCall, Recorder, launch
from gpusim.torch.distributed.runners import instances
from tests.oracles.budget import slow
from tests.oracles.machine_time import until
from tests.oracles.owned import nothing_left
from tests.torch.children import die_with, needs_linux
from tests.torch.distributed_programs import start
from tests.torch.gloo_cases import assert_equal_bits, case_name, run
from tests.torch.gloo_ranks import Case, Found
from tests.torch.test_distributed_processes import SMALL

pytestmark = needs_linux


class Pairs:
    """An engine of Unix sockets between processes of one fork."""

    def __init__(self, instance: int, ends: dict[int, socket.socket]) -> None:
        self.instance, self.instances, self.ends = instance, len(ends) + 1, ends

    def exchange(self, sends: Sequence[Buffer], receives: Sequence[Buffer], tag: int) -> Any:
        for array, to in sends:
            self.ends[to].sendall(array.tobytes())
        for array, source in receives:
            content = b""
            while len(content) < array.nbytes:
                more = self.ends[source].recv(array.nbytes - len(content))
                if not more:
                    raise InstanceError(source, f"instance {source} is gone")
                content += more
            array[...] = np.frombuffer(content, array.dtype).reshape(array.shape)
        return self

    def wait(self) -> None:
        pass


def spread_out(
    body: Callable[[], Any], counts: Sequence[int], *, alone: bool = False
) -> tuple[Any, list[int]]:
    """What the body returns on instance 0, and the exit codes of the other instances.

    They are forked. Their code is 3 if the body raises there what it raises here. They are killed
    when this process ends, unless they are left `alone`.
    """
    pairs = {(a, b): socket.socketpair() for b in range(len(counts)) for a in range(b)}

    def world(instance: int) -> World:
        ends = {}
        for (a, b), (one, other) in pairs.items():
            if a == instance:
                ends[b] = one
            if b == instance:
                ends[a] = other
            if a != instance:  # so that the end of a process is seen
                one.close()
            if b != instance:
                other.close()
        engine: Any = Pairs(instance, ends)
        return World(counts, engine)

    others, parent = [], os.getpid()
    for instance in range(1, len(counts)):
        process = os.fork()
        if not process:
            code = 4
            try:
                if not alone:
                    die_with(parent)
                torch.set_num_threads(1)  # OpenMP of the parent may hang in a fork
                with world(instance):
                    body()
                code = 0
            except (GpusimError, KeyboardInterrupt) as error:
                print(f"instance {instance}: {type(error).__name__}: {error}", file=sys.stderr)
                code = 3
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        others.append(process)
    try:
        with world(0):
            found = body()
    except GpusimError as error:
        found = error
    finally:
        for one, other in pairs.values():
            one.close()
            other.close()
        codes = [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in others]
    return found, codes


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """No process, file or thread of a launch is left."""
    launch(int, 1, processes=True)  # modules of torch are loaded, which may keep files open
    with nothing_left(tmp_path):
        yield
    watching = lambda each: each.name.startswith("gpusim instance")  # noqa: E731
    assert until(lambda: not any(map(watching, threading.enumerate())))


@pytest.fixture(autouse=True)
def limits_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that waits until a limit hangs, and none ends early on a busy machine."""
    monkeypatch.setattr(instances, "LIMIT", 100_000.0)
    monkeypatch.setattr(instances, "HELLO_LIMIT", 100_000.0)


def spread_case(
    case: Case, folder: Path, counts: Sequence[int], expected: Found, **options: Any
) -> None:
    def body() -> Any:
        found = run(case, folder, **options)
        if os.getpid() != parent:  # all instances have the results
            assert_equal_bits(expected, found)
        return found

    parent = os.getpid()
    found, codes = spread_out(body, counts)
    if isinstance(found, BaseException):
        raise found
    assert codes == [0] * (len(counts) - 1)
    assert_equal_bits(expected, found)


FOUR: list[Case] = [(name, 4, arguments) for name, _, arguments in SMALL]


@pytest.mark.parametrize(
    "case", [FOUR[0], FOUR[1], *slow(*((c,) for c in FOUR[2:]))], ids=case_name
)
def test_bits_are_those_of_threads(case: Case, tmp_path: Path) -> None:
    spread_case(case, tmp_path, (2, 2), run(case, tmp_path))


@pytest.mark.parametrize("counts", [(3, 2), *slow(((1, 1, 3),), ((4, 1),))])
def test_uneven_instances(counts: tuple[int, ...], tmp_path: Path) -> None:
    case: Case = ("messages", 5, {"seed": 0})
    spread_case(case, tmp_path, counts, run(case, tmp_path), schedule="free")


# What is not the same as on one instance


def test_recorder_and_chooser(tmp_path: Path) -> None:
    """The record is instance 0's; a function that chooses Reductions is called by the ranks."""
    parent = os.getpid()

    def chosen(call: FoldCall) -> str:
        return "tree" if call.size < 64 else "ring"

    def program(rank: int) -> list[torch.Tensor]:
        start()
        found = [torch.rand(size, dtype=torch.bfloat16) + rank for size in (7, 640)]
        for each in found:
            dist.all_reduce(each)
        return found

    expected = launch(program, 3, reduction=chosen)

    def body() -> Any:
        recorder = Recorder()
        found = launch(program, 3, reduction=chosen, recorder=recorder)
        assert found[2][1].equal(expected[2][1]) and found[0][0].equal(expected[0][0])
        return [(row.operation, row.order, row.ranks) for row in recorder.summary()]

    found, codes = spread_out(body, (1, 2))
    assert found == [("all_reduce", "ring", 3), ("all_reduce", "tree", 3)] and codes == [0]
    assert os.getpid() == parent


def test_output_is_written_by_instance_0(capfd: pytest.CaptureFixture[str]) -> None:
    def program(rank: int) -> None:
        start()
        for each in range(3):
            if each == rank:
                print(f"from {rank}", flush=True)
            dist.barrier()

    def body() -> None:
        if os.getpid() != parent:
            os.close(1)
        launch(program, 3)

    parent = os.getpid()
    _, codes = spread_out(body, (2, 1))
    assert capfd.readouterr().out == "from 0\nfrom 1\nfrom 2\n" and codes == [0]


# Faults


def fails(
    program: Callable[[int], Any],
    error: type[BaseException],
    said: str,
    counts: tuple[int, ...] = (2, 2),
) -> BaseException:
    """Assert that the launch ends on all instances, with an error that says this."""

    def body() -> BaseException:
        with pytest.raises(error, match=said) as caught:
            launch(program, sum(counts))
        assert type(caught.value) is error
        return caught.value

    found, codes = spread_out(body, counts)
    assert isinstance(found, error) and codes == [0] * (len(counts) - 1)
    return found


def same_as_threads(program: Callable[[int], Any]) -> None:
    """Assert that the launch fails with the error of threads."""
    with pytest.raises(GpusimError) as caught:
        launch(program, 4)
    fails(program, type(caught.value), f"^{re.escape(str(caught.value))}$")


def test_ranks_that_differ() -> None:
    def program(rank: int) -> None:
        start()
        dist.all_reduce(torch.ones(3 if rank < 3 else 4))

    same_as_threads(program)
    fails(program, CollectiveMismatchError, "differ in tensors")


def test_a_rank_that_works_keeps_its_turn() -> None:
    """Its instance says that it works; rank 3 would else come first, and be told of two ranks."""

    def program(rank: int) -> None:
        start()
        while rank == 2 and time.process_time() < 1:
            pass
        dist.all_reduce(torch.ones(3 if rank < 3 else 4))

    same_as_threads(program)


def test_a_rank_that_waits_elsewhere_lets_others_go_on(tmp_path: Path) -> None:
    """Its instance says that it does nothing."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def program(rank: int) -> str:
        if rank == 2:
            return pipe.read_text()
        if rank == 3:
            pipe.write_text("from rank 3")
        return ""

    def body() -> list[str]:
        return launch(program, 4)

    assert spread_out(body, (2, 2)) == (["", "", "from rank 3", ""], [0])


def test_deadlock() -> None:
    def program(rank: int) -> None:
        start()
        if rank != 3:
            dist.barrier()

    same_as_threads(program)
    fails(program, DeadlockError, "rank 3 has returned")


@pytest.mark.parametrize("culprit", [0, 3])
def test_a_rank_that_raises(culprit: int) -> None:
    def program(rank: int) -> None:
        start()
        if rank == culprit:
            raise KeyError("weights")
        dist.barrier()

    def body() -> None:
        with pytest.raises(ReplicaError, match=f"rank {culprit} raised KeyError: 'weights'") as got:
            launch(program, 4)
        assert got.value.index == culprit
        cause = got.value.__cause__
        assert isinstance(cause, KeyError) and "raise KeyError" in str(cause.__cause__)

    assert spread_out(body, (2, 2)) == (None, [0])


def test_a_result_that_cannot_be_sent() -> None:
    fails(
        lambda rank: object(),
        ReplicaError,
        "returned <object object at .*>, which cannot be handed back",
    )


@pytest.mark.parametrize("how", [signal.SIGKILL, 7])
def test_a_process_that_dies(how: int) -> None:
    def program(rank: int) -> None:
        start()
        if rank == 3:
            if how == 7:
                os._exit(7)
            os.kill(os.getpid(), how)
        dist.barrier()

    said = "ended with exit code 7" if how == 7 else "was killed by SIGKILL"
    fails(program, ReplicaError, f"the process of rank 3 {said}")


@pytest.mark.parametrize("computes", [1, 2])
@pytest.mark.parametrize("dies", [0, 1])
def test_an_instance_that_dies(dies: int, computes: int, tmp_path: Path) -> None:
    """While one rank computes, there or on the other instance, and the others wait for it."""

    def kill() -> None:
        while sum(bool(each.read_text()) for each in tmp_path.iterdir()) < 4:
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getppid(), signal.SIGKILL)

    def program(rank: int) -> None:
        start()
        if rank == 3 * dies:
            threading.Thread(target=kill, daemon=True).start()
        (tmp_path / f"rank {rank}").write_text(str(os.getpid()))
        dist.barrier()
        while rank == computes:
            time.sleep(0.01)
        dist.barrier()

    def body() -> None:
        launch(program, 4)

    if dies:
        found, codes = spread_out(body, (2, 2))
        assert isinstance(found, InstanceError) and found.instance == 1
        assert str(found) == "instance 1 (ranks 2 to 3) is gone, in the midst of a launch"
        assert codes == [-signal.SIGKILL]
    else:  # in another process, as the one that dies is instance 0
        here = os.getpid()
        parent = os.fork()
        if not parent:
            die_with(here)
            os.setpgid(0, 0)
            spread_out(body, (2, 2), alone=True)  # as gpusim has to end the others
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == -signal.SIGKILL
    pids = [int(each.read_text()) for each in tmp_path.iterdir()]
    assert until(lambda: not any(map(runs, pids)))


def runs(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_launches_that_differ() -> None:
    parent = os.getpid()

    def body() -> None:
        order = "tree" if os.getpid() == parent else "ring"
        with pytest.raises(CollectiveMismatchError, match="differ in reduction"):
            launch(int, 2, reduction=order)

    assert spread_out(body, (1, 1)) == (None, [0])


def test_ranks_are_those_of_the_world() -> None:
    def body() -> None:
        with pytest.raises(ValueError, match="ranks=3: expected 4, as many as the 2 instances"):
            launch(int, 3)

    assert spread_out(body, (2, 2)) == (None, [0])


def test_an_address_of_another_machine() -> None:
    parent = os.getpid()

    def body() -> None:
        if os.getpid() == parent:
            with pytest.raises(GpusimError, match=r"instance 0 cannot listen at 192\.0\.2\.1"):
                launch(int, 2, address="192.0.2.1")
        else:
            with pytest.raises(InstanceError, match="instance 0 cannot listen"):
                launch(int, 2, address="192.0.2.1")

    assert spread_out(body, (1, 1)) == (None, [0])


@pytest.mark.parametrize("hello", [b"", b"GET / HTTP/1.1\r\n\r\n" * 3, "no token", "silent"])
def test_strangers_are_not_let_in(hello: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger connects before the instances do, and is closed."""
    if hello == "silent":  # it is closed by the limit
        monkeypatch.setattr(instances, "HELLO_LIMIT", 3.0)
    share = instances.InstancesLaunch._share
    closed: list[bytes] = []

    def talk(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as end:
            if hello == "no token":
                end.sendall(struct.pack("<32sIi", b"x" * 32, 1, 1))
            elif hello != "silent":
                end.sendall(hello)
                end.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                closed.append(end.recv(1))
            closed.append(b"")

    threads = []

    def shared(self: Any, place: bytes) -> bytes:
        if not self.instance:
            port = instances.PLACE.unpack(place)[2]
            threads.append(threading.Thread(target=talk, args=[port]))
            threads[0].start()
            time.sleep(0.2)
        return share(self, place)

    monkeypatch.setattr(instances.InstancesLaunch, "_share", shared)

    def program(rank: int) -> float:
        start()
        x = torch.tensor(float(rank))
        dist.all_reduce(x)
        return x.item()

    assert spread_out(lambda: launch(program, 2), (1, 1)) == ([1.0, 1.0], [0])
    threads[0].join()
    assert set(closed) == {b""}
