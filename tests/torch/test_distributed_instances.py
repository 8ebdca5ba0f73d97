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
from gpusim.runtime.environment import spread
from gpusim.torch.distributed import FoldCall, Recorder, instances, launch
from tests.oracles.budget import slow
from tests.torch.distributed_programs import PROGRAMS, start
from tests.torch.gloo_ranks import Case
from tests.torch.test_distributed import all_cases, assert_equal_bits, case_name, run
from tests.torch.test_distributed_processes import SMALL, children, files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes need Linux")


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


def spread_out(body: Callable[[], Any], counts: Sequence[int]) -> tuple[Any, list[int]]:
    """What the body returns on instance 0, and the exit codes of the other instances.

    They are forked. Their code is 3 if the body raises there what it raises here.
    """
    pairs = {(a, b): socket.socketpair() for b in range(len(counts)) for a in range(b)}

    def world(instance: int) -> World:
        ends = {}
        for (a, b), (one, other) in pairs.items():
            if a == instance:
                ends[b] = one
            if b == instance:
                ends[a] = other
        engine: Any = Pairs(instance, ends)
        return World(counts, engine)

    others = []
    for instance in range(1, len(counts)):
        process = os.fork()
        if not process:
            code = 4
            try:
                signal.alarm(60)
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
def nothing_is_left() -> Iterator[None]:
    """No process, file or thread of a launch is left."""
    launch(int, 1, processes=True)  # modules of torch are loaded
    before = children(), files()
    yield
    assert children() <= before[0]
    after = files()
    assert {after[name] for name in after.keys() - before[1].keys()} == set()
    end = time.monotonic() + 5
    while any(each.name.startswith("gpusim instance") for each in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)


def spread_case(case: Case, folder: Path, counts: Sequence[int], **options: Any) -> Any:
    def body() -> Any:
        found = run(case, folder, **options)
        if os.getpid() != parent:  # all instances have the results
            assert_equal_bits(expected, found)
        return found

    parent = os.getpid()
    expected = run(case, folder)
    found, codes = spread_out(body, counts)
    if isinstance(found, BaseException):
        raise found
    assert codes == [0] * (len(counts) - 1)
    assert_equal_bits(expected, found)


FOUR: list[Case] = [(name, 4, arguments) for name, _, arguments in SMALL]


@pytest.mark.parametrize("case", [FOUR[0], FOUR[1], *slow(*((c,) for c in FOUR[2:]))], ids=case_name)
def test_bits_are_those_of_threads(case: Case, tmp_path: Path) -> None:
    spread_case(case, tmp_path, (2, 2))


@pytest.mark.parametrize("counts", [(3, 2), *slow((1, 1, 3), (4, 1))])
def test_uneven_instances(counts: tuple[int, ...], tmp_path: Path) -> None:
    spread_case(("messages", 5, {"seed": 0}), tmp_path, counts, schedule="free")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", PROGRAMS)
def test_bits_of_all_programs_are_those_of_threads(name: str, ranks: int, tmp_path: Path) -> None:
    for case in all_cases():
        if case[:2] == (name, ranks):
            spread_case(case, tmp_path, spread(ranks, 2))
