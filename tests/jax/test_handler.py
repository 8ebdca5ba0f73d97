"""The handler's own parts: the threads on which calls end, and the end of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from gpusim.fallback import threads
from tests.jax import child
from tests.oracles.machine_time import PATIENCE

pytest.importorskip("jax")

from gpusim.jax.endings import CAUTIOUS, Endings, Habit, start

COUNT = 64


def finish(endings: Endings) -> None:
    """Watch as the board's thread does, till all functions are over."""
    limit = time.monotonic() + PATIENCE
    while endings.is_busy() and time.monotonic() < limit:
        endings.watch()
        time.sleep(0.0005)
    assert not endings.is_busy()
    assert not endings.watch()


def waiting_for_each_other(barrier: threading.Barrier) -> list[Callable[[], object]]:
    return [barrier.wait] * barrier.parties


def test_functions_that_wait_for_each_other_all_run() -> None:
    """As programs do behind whose sums XLA's own collectives come."""
    endings, habit, barrier = Endings(), Habit(), threading.Barrier(COUNT)
    with threads.limited(2):
        for _ in range(3):
            endings.begin(waiting_for_each_other(barrier), habit)
            finish(endings)


def test_calls_that_waited_have_a_thread_for_each_function_next() -> None:
    """And after some calls few threads are tried again."""
    endings, habit, barrier = Endings(), Habit(), threading.Barrier(COUNT)
    with threads.limited(2):
        endings.begin(waiting_for_each_other(barrier), habit)
        finish(endings)
        for _ in range(CAUTIOUS):
            endings.begin(waiting_for_each_other(barrier), habit)
            assert not endings.watch()  # nothing to look at: all run already
            finish(endings)
        endings.begin(waiting_for_each_other(barrier), habit)
        assert endings.watch()
        finish(endings)


def test_functions_that_do_not_wait_share_few_threads() -> None:
    endings, seen, done = Endings(), set(), threading.Semaphore(0)

    def function() -> None:
        seen.add(threading.get_ident())
        done.release()

    with threads.limited(2):
        for _ in range(5):
            endings.begin([function] * COUNT, Habit())
            for _ in range(COUNT):
                assert done.acquire(timeout=PATIENCE)
    # Two at a time; a thread may still be on its way back when the next call begins.
    assert len(seen) <= 10


def test_a_function_that_fails_leaves_the_others_their_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda given: failures.append(given.exc_type))
    endings, ran = Endings(), []

    def fail() -> None:
        raise LookupError

    for habit in (None, Habit()):
        endings.begin([fail, *[lambda: ran.append(1)] * COUNT, fail], habit)
        finish(endings)
    assert len(ran) == 2 * COUNT
    limit = time.monotonic() + PATIENCE
    while len(failures) < 4 and time.monotonic() < limit:
        time.sleep(0.001)
    assert failures == [LookupError] * 4


def test_threads_start_where_python_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python 3.12 does once a process begins to end, when programs may be in flight."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ran = threading.Event()
    start(ran.set)
    assert ran.wait(PATIENCE)


def test_the_end_of_a_record_waits_for_what_is_computed() -> None:
    child.run(4, "handler:settling_waits_for_what_is_computed", timeout=PATIENCE)


IN_FLIGHT = """
import jax
import gpusim.jax

gpusim.jax.install("linear")
mesh = jax.sharding.Mesh(jax.devices(), ("i",))
P = jax.sharding.PartitionSpec


def program(x):
    for _ in range(8):
        x = jax.lax.ppermute(jax.lax.psum(x, "i"), "i", [(k, (k + 1) % 8) for k in range(8)])
    return x


mapped = jax.shard_map(program, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
results = [jax.jit(mapped)(jax.numpy.ones((8, 4096))) for _ in range(3)]
"""
PROGRAM = """
import jax
import gpusim.jax
from gpusim.jax import ffi

gpusim.jax.install("linear")
mesh = jax.sharding.Mesh(jax.devices(), ("i",))
P = jax.sharding.PartitionSpec
total = jax.shard_map(lambda x: jax.lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
compiled = jax.jit(total).lower(jax.numpy.ones(8)).compile()
jax.block_until_ready(compiled(jax.numpy.ones(8)))
enter = ffi.Handler._enter_execute


def hold(self, *args):
    return enter(self, *args)


ffi.Handler._enter_execute = hold
"""


@pytest.mark.parametrize("program", [PROGRAM, IN_FLIGHT], ids=["held", "in flight"])
def test_a_process_ends_well(program: str) -> None:
    """Held: the handler's class holds the program, so that Python clears both in any order.

    In flight: devices' first calls end when the main thread is done.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=child.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
