"""The kernels' threads: the same bits for any number of them, and no caller ever hangs."""

from __future__ import annotations

import contextvars
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import gpusim
from gpusim import collectives, lax
from gpusim.fallback import copy, fold, ragged, ragged_copy, round_to, threads
from tests.contract.fold_limits import fold_limits
from tests.oracles.machine_time import PATIENCE

COUNTS = [1, 2, 7]
ODD = {"BLOCK": 1009, "SHARED_WORK": 0, "SHARED_WIDTH": 37, "CAST_WIDTH": 100}


@pytest.fixture(params=COUNTS, ids=lambda count: f"{count} threads")
def count(request: pytest.FixtureRequest) -> Iterator[int]:
    """So many threads, and work of any size shared among them in odd portions."""
    with threads.limited(request.param), fold_limits(**ODD):
        yield request.param


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape).astype(dtype)


def bits(array: np.ndarray) -> bytes:
    return np.asarray(array).tobytes()


# The bits do not depend on the number of threads.


@pytest.mark.parametrize("order", ["linear", "reverse", "tree", "ring"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.float8_e5m2], ids=str)
@pytest.mark.parametrize("shape", [(5, 3001), (40, 333)], ids=str)
def test_a_fold_has_the_same_bits(count: int, order: str, rounding: str, dtype: Any, shape: Any):
    x = numbers(*shape, dtype=dtype)
    how: dict[str, Any] = {"order": order, "rounding": rounding, "seed": 9, "call": 2, "places": 4}
    shared = fold(x, **how), fold(list(x), **how)
    with threads.limited(1), fold_limits(BLOCK=1 << 17, SHARED_WIDTH=8192):
        alone = fold(x, **how)
    assert [bits(result) for result in shared] == [bits(alone)] * 2


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_rounding_has_the_same_bits(count: int, rounding: str):
    x = numbers(3, 5001, dtype=np.float64)
    shared = round_to(x, np.float16, rounding=rounding, seed=5)
    with threads.limited(1), fold_limits(BLOCK=1 << 17):
        assert bits(shared) == bits(round_to(x, np.float16, rounding=rounding, seed=5))


def test_copies_are_complete(count: int):
    x = numbers(7, 1234, 3)
    out = np.empty((3, 1234, 7), np.float32)
    copy([(out, x.T), (y := np.empty((2, 3000)), np.float64(2.0))])
    assert np.array_equal(out, x.T) and (y == 2).all()


@pytest.mark.parametrize("short", [0, 1 << 40], ids=["by slices", "by index"])
def test_ragged_copies_are_complete(count: int, short: int):
    random = np.random.default_rng(count)
    x, rows = numbers(6, 500, 8), random.permutation(6 * 125)
    source, start = np.divmod(rows, 125)
    target, to = np.divmod(np.arange(6 * 125), 125)
    segments = np.stack([source, 4 * start, target, 4 * to, np.full(750, 4)], axis=1)
    out = np.empty_like(x)
    with mock.patch.multiple(ragged, SHORT_SEGMENT=short, STRETCH=1000):
        ragged_copy(x, out, random.permutation(segments))
    assert np.array_equal(out.reshape(750, 4, 8), x.reshape(750, 4, 8)[rows])


# Who works, and how many.


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 6),
        ({"OMP_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": "64"}, 6),
        ({"OMP_NUM_THREADS": "many"}, 6),
        ({"OMP_NUM_THREADS": "2", "GPUSIM_THREADS": "9"}, 9),
        ({"GPUSIM_THREADS": " 1 "}, 1),
        ({"GPUSIM_THREADS": ""}, 6),
    ],
    ids=str,
)
def test_the_environment_says_how_many_threads(
    settings: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
):
    for name in ("GPUSIM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(threads, "cores", lambda: 6)
    assert threads.default_count() == expected


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5", "²"])
def test_another_gpusim_threads_is_named(given: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GPUSIM_THREADS", given)
    with pytest.raises(ValueError, match=f"GPUSIM_THREADS='{given}': expected a positive integer"):
        threads.default_count()


def helpers() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("kernels")}


def test_one_thread_means_no_pool():
    before = helpers()
    with threads.limited(1):
        workers: set[int] = set()
        threads.run(lambda item: workers.add(threading.get_ident()), range(100))
    assert workers == {threading.get_ident()} and helpers() <= before


def test_small_work_is_done_by_the_caller():
    with threads.limited(4):
        workers: set[int] = set()
        threads.share(lambda item: workers.add(threading.get_ident()), range(9), work=1000)
    assert workers == {threading.get_ident()}


def test_helpers_take_part_and_are_dismissed():
    before = helpers()
    with threads.limited(3):
        meet = threading.Barrier(3, timeout=PATIENCE)
        threads.run(lambda item: meet.wait(), range(3))
        started = helpers() - before
    for thread in started:
        thread.join(PATIENCE)
    assert len(started) == 2 and not helpers() & started


# Exceptions, contexts, and calls inside calls.


def test_an_exception_of_a_helper_is_raised_at_the_call():
    caller, done = threading.get_ident(), []

    def fail(item: int) -> None:
        done.append(item)
        if threading.get_ident() != caller:
            raise LookupError("a helper's")
        time.sleep(0.002)

    with threads.limited(2), pytest.raises(LookupError, match="a helper's"):
        threads.run(fail, range(100_000))
    assert len(done) < 100_000  # the items that no thread had begun are left


def test_an_exception_of_the_caller_waits_for_the_helpers():
    caller, inside = threading.get_ident(), threading.Event()
    ended = []

    def work(item: int) -> None:
        if threading.get_ident() == caller:
            assert inside.wait(PATIENCE)
            raise KeyboardInterrupt
        inside.set()
        time.sleep(0.05)
        ended.append(item)

    with threads.limited(2), pytest.raises(KeyboardInterrupt):
        threads.run(work, range(50))
    assert len(ended) == 1


def test_helpers_have_the_callers_context():
    mark = contextvars.ContextVar("mark", default=0)
    mark.set(5)
    seen: list[tuple[int, str]] = []
    with threads.limited(3), np.errstate(over="raise"):
        meet = threading.Barrier(3, timeout=PATIENCE)

        def look(item: int) -> None:
            meet.wait()
            seen.append((mark.get(), np.geterr()["over"]))

        threads.run(look, range(3))
    assert seen == [(5, "raise")] * 3


def test_a_helper_may_call_run():
    with threads.limited(3):
        done: list[tuple[int, int]] = []
        threads.run(
            lambda i: threads.run(lambda j: done.append((i, j)), range(20)),
            range(20),
        )
    assert len(set(done)) == 400


@pytest.mark.parametrize("count", [1, 2, 7])
def test_replicas_of_a_pmap_fold(count: int):
    """Groups meet in several replicas' threads at once, and each thread shares its fold."""
    x = numbers(8, 4000)
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
    with threads.limited(count), fold_limits(**ODD):
        f = gpusim.pmap(lambda v: lax.psum(v, "i", axis_index_groups=pairs) + lax.psum(v, "i"), "i")
        for _ in range(5):
            found = f(x)
    groups = gpusim.Groups.from_axis_index_groups(pairs, 8)
    expected = collectives.psum(x, groups=groups).value + collectives.psum(x).value
    assert bits(found) == bits(expected)


def test_many_threads_fold_at_once():
    x = numbers(8, 20_000, dtype=np.float16)
    expected = bits(fold(x, rounding="stochastic"))
    found: list[bytes] = []
    with threads.limited(3), fold_limits(**ODD):
        callers = [
            threading.Thread(target=lambda: found.append(bits(fold(x, rounding="stochastic"))))
            for _ in range(6)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(PATIENCE)
    assert found == [expected] * 6


# Processes.

ENVIRONMENT = {**os.environ, "GPUSIM_THREADS": "3"}


def python(program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        **options,
    )


def test_a_forked_child_starts_its_own_threads():
    ended = python(
        """
import os, threading
import numpy as np
from gpusim.fallback import fold, threads
x = np.ones((8, 400_000), np.float32)
assert fold(x)[0] == 8 and threads.count() == 3
child = os.fork()
if not child:
    meet = threading.Barrier(3)
    threads.run(lambda item: meet.wait(), range(3))
    os._exit(0 if fold(x)[-1] == 8 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("both")
"""
    )
    assert ended.stdout == "both\n", ended.stderr


def test_a_program_ends_while_helpers_wait():
    ended = python(
        "import numpy as np; from fallback import fold; fold(np.ones((8, 400_000)));print('end')"
    )
    assert (ended.stdout, ended.returncode) == ("end\n", 0), ended.stderr


def test_ctrl_c_ends_a_fold_at_once_and_the_next_one_is_right():
    program = """
import numpy as np
from gpusim.fallback import fold
x = np.ones((8, 1_000_000), np.float16)
try:
    print("ready", flush=True)
    while True:
        fold(x, rounding="stochastic")
except KeyboardInterrupt:
    print(float(fold(x).min()), float(fold(x).max()), flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=PATIENCE)
    assert (out, process.returncode) == ("8.0 8.0\n", 0)
