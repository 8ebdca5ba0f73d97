"""pmap: slots, rendezvous, errors instead of hangs, and arrays that belong to one replica."""

from __future__ import annotations

import contextvars
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import gpusim
from gpusim import lax
from gpusim.maps import ending, workers
from tests.oracles.machine_time import PATIENCE, until

SCHEDULES = ["cores", "one"]


def replica_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("gpusim ")]


@pytest.fixture(autouse=True)
def no_thread_is_left_behind():
    yield
    assert replica_threads() == []


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_any_python_runs(schedule, size):
    def f(x):
        total = 0
        while total < x:  # a branch on a value, which vmap cannot take
            total += 1
        return lax.psum(np.float64(total), "i")

    result = gpusim.pmap(f, "i", schedule=schedule)(np.arange(size))
    assert result.tolist() == [sum(range(size))] * size


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_replica_that_returns_early_is_a_deadlock_error(schedule):
    def f(x):
        return x if x == 1 else lax.psum(x, "i")

    with pytest.raises(gpusim.DeadlockError) as caught:
        gpusim.pmap(f, "i", schedule=schedule)(np.arange(4))
    message = str(caught.value)
    assert "replicas 0, 2, 3 of axis 'i' wait in lax.psum" in message
    assert "replica 1 returned" in message
    assert re.search(r"test_pmap\.py:\d+", message)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("f", "words"),
    [
        (
            lambda x: lax.psum(x, "i") if x < 1 else lax.pmax(x, "i"),
            ["lax.psum", "lax.pmax", "collective"],
        ),
        (lambda x: lax.psum(np.ones(int(x) // 2), "i"), ["float64[0]", "float64[1]", "shapes"]),
        (lambda x: lax.psum(np.ones(2, f"f{4 + 4 * (x > 1)}"), "i"), ["float32[2]", "float64[2]"]),
        (
            lambda x: lax.ppermute(x, "i", [(0, 1)] if x else [(1, 0)]),
            ["lax.ppermute", "((0, 1),)", "((1, 0),)"],
        ),
        (lambda x: lax.psum((x, x) if x else [x, x], "i"), ["tree"]),
        (lambda x: lax.psum(1 if x else np.int64(1), "i"), ["Python int", "int64[]"]),
        (
            lambda x: lax.all_gather(np.ones(2), "i", axis=0 if x else 1),
            ["'axis': 0", "'axis': 1"],
        ),
    ],
)
def test_calls_that_differ_are_a_mismatch_that_names_both(schedule, f, words):
    with pytest.raises(gpusim.CollectiveMismatchError) as caught:
        gpusim.pmap(f, "i", schedule=schedule)(np.arange(3))
    message = str(caught.value)
    for word in words:
        assert word in message
    assert len(re.findall(r"test_pmap\.py:\d+", message)) == 2
    assert message.count("replica ") >= 2


def test_different_reductions_are_a_mismatch():
    def f(x):
        with gpusim.reduction(order="ring" if x else "tree"):
            return lax.psum(x, "i")

    with pytest.raises(gpusim.CollectiveMismatchError, match="ring"):
        gpusim.pmap(f, "i")(np.arange(2))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_exception_in_a_replica_ends_the_others(schedule):
    ended = []

    def f(x):
        if x == 2:
            raise ZeroDivisionError("by design")
        try:
            return lax.psum(x, "i")
        finally:
            ended.append(int(x))

    with pytest.raises(gpusim.ReplicaError) as caught:
        gpusim.pmap(f, "i", schedule=schedule)(np.arange(4))
    assert caught.value.index == 2
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "replica 2 of axis 'i'" in str(caught.value) and "by design" in str(caught.value)
    assert 2 not in ended


def test_replicas_that_loop_without_end_are_ended_too():
    def f(x):
        if x == 0:
            time.sleep(0.05)
            raise RuntimeError("stop")
        while True:
            pass

    with pytest.raises(gpusim.ReplicaError, match="stop"):
        gpusim.pmap(f, "i")(np.arange(5))


def test_a_replica_that_ignores_its_end_once_is_told_again():
    def f(x):
        if x == 0:
            time.sleep(0.05)
            raise RuntimeError("stop")
        try:
            while True:
                pass
        except BaseException:
            while True:
                pass

    with pytest.raises(gpusim.ReplicaError, match="stop"):
        gpusim.pmap(f, "i")(np.arange(2))


def test_ends_that_a_destructor_meets_are_not_shown(monkeypatch):
    class Dropped:
        def __init__(self, error: BaseException | None = None) -> None:
            self.error = error

        def __del__(self) -> None:
            if self.error is not None:
                raise self.error
            while True:  # the replica's end is lost here
                pass

    def f(x):
        if x == 0:
            time.sleep(0.05)
            raise RuntimeError("stop")
        Dropped()
        while True:
            pass

    shown = []
    hook = lambda ignored: shown.append(ignored.exc_type)  # noqa: E731
    monkeypatch.setattr(sys, "unraisablehook", hook)
    with pytest.raises(gpusim.ReplicaError, match="stop"):
        gpusim.pmap(f, "i")(np.arange(2))
    assert shown == []
    with ending.quiet_ends(KeyboardInterrupt):
        for error in (ending.ReplicaEnded(), KeyboardInterrupt(), ValueError()):
            Dropped(error)
    assert shown == [ValueError]
    assert until(lambda: sys.unraisablehook is hook)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (NameError, lambda x: lax.psum(x, "j")),
        (ValueError, lambda x: lax.all_to_all(np.ones(5), "i", 0, 0)),
        (IndexError, lambda x: lax.ppermute(x, "i", [(0, 9)])),
        (np.exceptions.AxisError, lambda x: lax.all_gather(x, "i", axis=4)),
        (TypeError, lambda x: lax.psum("text", "i")),
    ],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_errors_of_gpusim_keep_their_type_and_name_the_replica(error, call, schedule):
    with pytest.raises(error) as caught:
        gpusim.pmap(call, "i", schedule=schedule)(np.arange(3))
    assert any("replica" in note for note in caught.value.__notes__)


def test_a_replica_may_catch_an_error_of_a_collective_and_go_on():
    def f(x):
        with pytest.raises(ValueError, match="psum_scatter"):
            lax.psum_scatter(np.ones(5), "i")
        return lax.psum(x, "i")

    assert gpusim.pmap(f, "i")(np.arange(3)).tolist() == [3, 3, 3]


def test_the_users_own_value_error_is_a_replica_error():
    def f(x):
        raise ValueError("mine")

    with pytest.raises(gpusim.ReplicaError) as caught:
        gpusim.pmap(f, "i")(np.arange(3))
    assert isinstance(caught.value.__cause__, ValueError)


def test_arguments_and_shared_results_are_read_only():
    def f(x, y):
        for array in (x, y, lax.all_gather(x, "i")):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
        own = x.copy()
        own += 1
        return own

    x = np.zeros((2, 3))
    result = gpusim.pmap(f, "i", in_axes=(0, None))(x, np.ones(2))
    assert (result == 1).all() and (x == 0).all()


def test_results_of_collectives_belong_to_each_replica():
    def f(x):
        results = [
            lax.psum(x, "i"),
            lax.pmax(x, "i"),
            lax.ppermute(x, "i", [(0, 1), (1, 0)]),
            lax.psum_scatter(x, "i"),
            lax.all_to_all(x, "i", 0, 0),
        ]
        before = [result.copy() for result in results]
        for result in results:
            result += 1 + lax.axis_index("i")
        return [result - copy for result, copy in zip(results, before, strict=True)]

    x = np.arange(4.0).reshape(2, 2)
    for changed in gpusim.pmap(f, "i")(x):
        assert (changed[0] == 1).all() and (changed[1] == 2).all()
    assert (x == np.arange(4.0).reshape(2, 2)).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "send",
    [
        lambda x: lax.ppermute(x, "i", [(0, 1), (1, 2), (2, 0)]),
        lambda x: lax.pbroadcast(x, "i", 0),
        lambda x: lax.all_gather(x, "i")[0],
        lambda x: lax.pswapaxes(x, "i", 0),
        lambda x: lax.pmax(x, "i"),
    ],
)
def test_changing_what_was_sent_changes_nothing_for_the_receiver(schedule, send):
    def f(x):
        own = x.copy()
        received = send(own)
        before = received.copy()
        own[...] = -1
        lax.psum(0, "i")  # everybody has changed its own array by now
        return (received == before).all()

    assert gpusim.pmap(f, "i", schedule=schedule)(np.arange(9.0).reshape(3, 3)).all()


def test_one_runs_one_replica_at_a_time_in_order():
    trace = []

    def f(x):
        trace.append(("a", int(x)))
        lax.psum(x, "i")
        trace.append(("b", int(x)))
        lax.pmax(x, "i")
        trace.append(("c", int(x)))
        return x

    gpusim.pmap(f, "i", schedule="one")(np.arange(5))
    assert trace == [(step, x) for step in "abc" for x in range(5)]


def test_at_most_as_many_replicas_as_cores_run_at_once():
    running = most = 0
    lock = threading.Lock()

    def f(x):
        nonlocal running, most
        for _ in range(3):
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.002)
            with lock:
                running -= 1
            lax.psum(x, "i")
        return x

    gpusim.pmap(f, "i")(np.arange(16))
    assert most <= len(os.sched_getaffinity(0))


def test_a_thousand_replicas_multiply_matrices():
    x = np.random.default_rng(0).normal(size=(1024, 24, 24))
    result = gpusim.pmap(lambda x: lax.psum(x @ x, "i"), "i", out_axes=None)(x)
    np.testing.assert_allclose(result, (x @ x).sum(0), rtol=1e-12, atol=1e-9)


def test_each_replica_has_a_copy_of_the_callers_context():
    variable = contextvars.ContextVar("variable", default="outside")
    variable.set("caller")

    def f(x):
        assert variable.get() == "caller"
        variable.set(f"replica {x}")
        lax.psum(x, "i")
        assert variable.get() == f"replica {x}"
        with np.errstate(divide="raise"):
            lax.psum(x, "i")
        return x

    gpusim.pmap(f, "i")(np.arange(4))
    assert variable.get() == "caller"


def test_results_that_differ_in_tree_shape_or_dtype_are_value_errors():
    for f, words in [
        (lambda x: np.ones(int(x) + 1), "float64\\[1\\].*float64\\[2\\]"),
        (lambda x: np.ones(2, "f4" if x else "f8"), "float64.*float32"),
        (lambda x: (x,) if x else [x], "trees"),
    ]:
        with pytest.raises(ValueError, match=words):
            gpusim.pmap(f)(np.arange(2))


def test_out_axes_none_demands_equal_bits():
    assert gpusim.pmap(lambda x: lax.psum(x, "i"), "i", out_axes=None)(np.arange(3)) == 3
    with pytest.raises(ValueError, match="replicas 0 and 2"):
        gpusim.pmap(lambda x: np.where(x == 2, -0.0, 0.0), out_axes=None)(np.arange(3))


def test_in_and_out_axes_are_prefixes_of_trees():
    def f(tree, y):
        return {"sum": tree["a"] + tree["b"][0], "y": y}

    tree = {"a": np.arange(6).reshape(3, 2), "b": (np.arange(2.0),)}
    result = gpusim.pmap(f, in_axes=({"a": 0, "b": None}, -1), out_axes={"sum": -1, "y": 0})(
        tree, np.arange(6).reshape(2, 3)
    )
    assert result["sum"].tolist() == [[0, 2, 4], [2, 4, 6]]
    assert result["y"].tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pmap_inside_pmap_shares_turns_and_meets_along_both_axes(schedule):
    def f(x):
        lax.psum(x, "i")
        inner = gpusim.pmap(
            lambda y: (
                lax.psum(y, "i"),
                lax.psum(y, "j"),
                lax.psum(y, ("j", "i")),
                lax.axis_index("j"),
            ),
            "j",
        )
        return inner(x)

    x = np.arange(6).reshape(2, 3)
    over_i, over_j, both, index = gpusim.pmap(f, "i", schedule=schedule)(x)
    assert (over_i == x.sum(0)).all() and (over_j == x.sum(1, keepdims=True)).all()
    assert (both == 15).all() and (index == np.arange(3)).all()


def test_an_inner_pmaps_error_can_be_caught_by_the_outer_replica():
    def inner(y):
        if y == 1:
            raise KeyError("inner")
        return lax.psum(y, "j")

    def f(x):
        with pytest.raises(gpusim.ReplicaError) as caught:
            gpusim.pmap(inner, "j")(np.arange(3))
        assert caught.value.index == 1
        return lax.psum(x, "i")

    assert gpusim.pmap(f, "i")(np.arange(4)).tolist() == [6] * 4


def test_an_inner_pmap_ends_with_its_outer_replica():
    def f(x):
        if x == 0:
            time.sleep(0.05)
            raise RuntimeError("outer")
        return gpusim.pmap(lambda y: lax.psum(y, ("i", "j")), "j")(np.arange(3))

    with pytest.raises(gpusim.ReplicaError, match="outer"):
        gpusim.pmap(f, "i")(np.arange(3))


def test_waiting_across_nested_maps_is_a_deadlock_not_a_hang():
    def f(x):
        if x == 0:
            return lax.psum(x, "i")
        return gpusim.pmap(lambda y: lax.psum(y, ("i", "j")), "j")(np.arange(2))[0]

    with pytest.raises(gpusim.DeadlockError):
        gpusim.pmap(f, "i")(np.arange(2))


def test_the_reduction_context_counts_calls_per_replica():
    with gpusim.reduction(rounding="stochastic", seed=3) as state:
        gpusim.pmap(lambda x: lax.psum((x, x), "i"), "i")(np.ones(4, np.float16))
        assert state.calls == 2


def test_a_collective_from_a_foreign_thread_is_an_error():
    def f(x):
        caught = []

        def work():
            try:
                context.run(lax.psum, x, "i")
            except RuntimeError as error:
                caught.append(error)

        context = contextvars.copy_context()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert "own thread" in str(caught[0])
        return x

    gpusim.pmap(f, "i")(np.arange(2))


def test_python_scalars_that_differ_between_replicas_are_folded():
    def f(x):
        index = int(lax.axis_index("i"))
        total, most = lax.psum(index, "i"), lax.pmax(index, "i")
        assert type(total) is int and type(lax.psum(1, "i")) is int
        assert type(lax.psum(0.5 * index, "i")) is float
        return np.array([total, most, lax.psum(True, "i")])

    assert (gpusim.pmap(f, "i")(np.zeros(4)) == [6, 3, 4]).all()


def test_a_system_without_threads_is_an_error(monkeypatch):
    start, budget = threading.Thread.start, [5]

    def limited(thread):
        budget[0] -= 1
        if budget[0] < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    monkeypatch.setattr(workers, "_pool", workers._Pool())  # no idle threads
    with pytest.raises(gpusim.GpusimError, match="could not start the thread of replica"):
        gpusim.pmap(lambda x: lax.psum(x, "i"), "i")(np.arange(20))


def test_bad_arguments_of_pmap():
    with pytest.raises(TypeError, match="needs a function"):
        gpusim.pmap(3)
    with pytest.raises(ValueError, match="schedule"):
        gpusim.pmap(abs, schedule="all")
    with pytest.raises(ValueError, match="devices"):
        gpusim.pmap(abs, devices=["gpu:0"])
    with pytest.raises(ValueError, match="axis_size"):
        gpusim.pmap(abs, axis_size=0)


def test_replicas_see_ctrl_c_once_and_have_time():
    """Also one that goes on after it; the next collective ends that."""
    code = textwrap.dedent(
        """
        import time
        import numpy as np, gpusim
        from gpusim import lax

        def compute(seconds):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                pass

        class Dropped:
            def __del__(self):  # an end that is raised here is lost
                compute(0.2)

        said = []

        def f(x):
            try:
                lax.psum(x, "i")
                if x == 0:
                    print("running", flush=True)
                    while True:
                        Dropped()
                        compute(0.2)
                lax.psum(x, "i")
            except KeyboardInterrupt:
                said.append(f"{x} interrupted")
            compute(0.5)
            said.append(f"{x} saved")
            try:
                lax.psum(x, "i")
            finally:
                said.append(f"{x} ended")

        try:
            gpusim.pmap(f, "i")(np.arange(3))
        except KeyboardInterrupt:
            print(*sorted(said), sep=", ", flush=True)
        """
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        try:
            out, _ = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    parts = [f"{x} {what}" for x in range(3) for what in ("ended", "interrupted", "saved")]
    assert out == ", ".join(parts) + "\n"
    assert process.returncode == 0


@pytest.mark.parametrize("delay", [0, 0.001, 0.003, 0.1])
def test_ctrl_c_ends_all_replicas(delay):
    code = textwrap.dedent(
        """
        import threading, time
        import numpy as np, gpusim
        from gpusim import lax

        def f(x):
            if x == 0:
                print("running", flush=True)
                while True:
                    pass
            return lax.psum(x, "i")

        try:
            gpusim.pmap(f, "i")(np.arange(50))
        except KeyboardInterrupt:
            left = [t for t in threading.enumerate() if t.name.startswith("gpusim")]
            print("interrupted, threads left:", len(left), flush=True)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        try:
            out, _ = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert out == "interrupted, threads left: 0\n"
    assert process.returncode == 0
