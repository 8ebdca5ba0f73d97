"""pmap's threads: a second Ctrl-C, threads that are kept, and numbers that are refused."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

import gpusim
from gpusim import lax
from gpusim.maps import scheduler, workers
from tests.oracles.budget import slow
from tests.oracles.machine_time import PATIENCE, blocked, until

PRELUDE = f"""
import faulthandler
faulthandler.dump_traceback_later({PATIENCE}, exit=True)
import os, queue, signal, socket, subprocess, sys, threading, time
import numpy as np, gpusim
from gpusim import lax
from gpusim.maps import workers
"""


def start(*code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + "".join(textwrap.dedent(part) for part in code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """The output of a process, which is killed if it does not end."""
    try:
        return process.communicate(timeout=PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.wait()


def run(*code: str) -> str:
    process = start(*code)
    out, errors = finish(process)
    assert process.returncode == 0, errors
    assert errors == ""
    return out


# --- Ctrl-C ---------------------------------------------------------------------------------------

BLOCKED = {
    "sleep": "time.sleep(1000)",
    "queue": "queue.Queue().get()",
    "socket": "ours, theirs = socket.socketpair(); ours.recv(1)",
    "lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "process": "subprocess.run(['sleep', '1000'], stdout=-3, stderr=-3)",
}


def interrupt_twice(process: subprocess.Popen[str]) -> None:
    """Send SIGINT, and another one as soon as pmap says that it waits."""
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "running\n"
    assert blocked(process.pid)  # one that is not yet would end at once
    os.kill(process.pid, signal.SIGINT)
    line = process.stderr.readline()
    assert re.match(r"gpusim: pmap is interrupted; pmap waits for replica \d of axis 'i' at ", line)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)


@pytest.mark.parametrize("call", ["sleep", *slow("queue", "socket", "lock", "process")])
def test_a_second_ctrl_c_ends_the_script_and_names_what_was_interrupted(call):
    process = start(
        f"""
        said = []
        def f(x):
            lax.psum(x, "i")
            if not said:
                said.append(x)
                print("running", flush=True)
            {BLOCKED[call]}
        gpusim.pmap(f, "i", schedule="one" if {call == "queue"} else "cores")(np.arange(4))
        """
    )
    interrupt_twice(process)
    _, errors = finish(process)
    assert process.returncode == -signal.SIGINT, errors  # as any script that Ctrl-C ends
    last = errors.strip().splitlines()[-1]
    assert re.match(r"pmap has abandoned replica \d of axis 'i' at <string>:\d+ in f", last), errors
    assert "KeyboardInterrupt" in errors


def test_after_a_second_ctrl_c_the_program_can_go_on():
    process = start(
        """
        first, gate = threading.Event(), threading.Event()
        ended = []
        def f(x):
            try:
                if x == 0:
                    print("running", flush=True)
                gate.wait()
                ended.append("went on")
            finally:
                ended.append(int(x))
        try:
            gpusim.pmap(f, "i")(np.arange(2))
        except KeyboardInterrupt as error:
            print(*error.__notes__)
        assert gpusim.pmap(lambda x: lax.psum(x, "i"), "i")(np.arange(9)).tolist() == [36] * 9
        gate.set()  # what was abandoned ends when it returns from C
        while len(ended) < 2:
            time.sleep(0.01)
        assert sorted(ended) == [0, 1], ended
        print("done")
        """
    )
    interrupt_twice(process)
    out, errors = finish(process)
    assert process.returncode == 0, errors
    assert out.splitlines()[-1] == "done"
    assert "pmap has abandoned replica 0" in out and "replica 1 of axis 'i'" in out
    assert errors == ""


def test_ctrl_c_while_pmap_runs_in_another_thread_is_the_main_threads():
    out = run(
        """
        def f(x):
            time.sleep(0.3)
            return lax.psum(x, "i")
        found = []
        thread = threading.Thread(target=lambda: found.append(gpusim.pmap(f, "i")(np.arange(3))))
        thread.start()
        time.sleep(0.1)
        for _ in range(2):
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            except KeyboardInterrupt:
                print("interrupted")
        thread.join()
        print(found[0].tolist())
        """
    )
    assert out == "interrupted\ninterrupted\n[3, 3, 3]\n"


@pytest.mark.slow
def test_an_error_of_a_replica_is_not_lost_if_ctrl_c_ends_the_wait_for_another():
    process = start(
        """
        asleep = threading.Event()
        def f(x):
            if x == 1:
                asleep.wait()  # a replica that has not begun would not begin after the error
                print("running", flush=True)
                raise ZeroDivisionError("by design")
            asleep.set()
            time.sleep(1000)
        gpusim.pmap(f, "i")(np.arange(2))
        """
    )
    interrupt_twice(process)
    _, errors = finish(process)
    assert process.returncode == -signal.SIGINT
    assert "replica 1 of axis 'i' raised ZeroDivisionError: by design" in errors
    assert "KeyboardInterrupt\npmap has abandoned replica 0" in errors


def test_an_error_that_a_blocked_replica_delays_is_announced(monkeypatch, capfd):
    monkeypatch.setattr(scheduler, "PATIENCE_AFTER_ERROR", 2.0)
    monkeypatch.setattr(sys.modules["gpusim.maps.pmap"], "cores", lambda: 2)
    blocked, gate = threading.Event(), threading.Event()
    announce = scheduler.PmapCall.announce_wait

    def announce_and_open(*arguments):
        announce(*arguments)
        gate.set()

    monkeypatch.setattr(scheduler.PmapCall, "announce_wait", announce_and_open)

    def f(x):
        if x == 1:
            blocked.wait()
            raise ZeroDivisionError("by design")
        blocked.set()
        gate.wait()

    with pytest.raises(gpusim.ReplicaError, match="by design"):
        gpusim.pmap(f, "i")(np.arange(2))
    said = capfd.readouterr().err
    assert said.startswith(
        "gpusim: replica 1 of axis 'i' raised ZeroDivisionError: by design; pmap waits for replica "
        "0 of axis 'i' at "
    ), said
    assert re.search(
        r"test_pmap_threads.py:\d+ in f, `gate.wait\(\)`; Ctrl-C, twice, abandons ", said
    )
    assert said.count("\n") == 1


# --- threads are kept -----------------------------------------------------------------------------


def test_a_program_without_collectives_needs_no_more_threads_than_cores():
    out = run(
        """
        used = set()
        def f(x):
            used.add(threading.get_ident())
            return x
        gpusim.pmap(f)(np.arange(200))
        assert len(used) <= len(os.sched_getaffinity(0)), len(used)
        gpusim.pmap(f, schedule="one")(np.arange(200))
        print(len(used) <= len(os.sched_getaffinity(0)))
        """
    )
    assert out == "True\n"


def test_threads_are_kept_between_calls():
    f = gpusim.pmap(lambda x: (lax.psum(x, "i"), threading.get_native_id()), "i")
    x = np.arange(20)
    f(x)
    _, once = f(x)
    _, again = f(x)
    assert len(set(once.tolist())) == 20  # each replica waits in a thread of its own
    assert set(once.tolist()) & set(again.tolist())


def test_a_kept_thread_begins_as_a_new_one():
    """Names, threading.local, tracers, and torch's grad mode do not leave a replica."""
    torch = pytest.importorskip("torch")
    local = threading.local()
    ours = threading.local()

    def f(x):
        thread = threading.current_thread()
        seen = thread.name, hasattr(local, "x"), sys.gettrace(), sys.getprofile()
        assert seen == (f"gpusim replica {int(x)} of axis 'i'", False, None, None)
        assert torch.is_grad_enabled()
        local.x = ours.x = x
        torch.set_grad_enabled(False)
        thread.name = "mine"
        sys.settrace(lambda *event: None)
        sys.setprofile(lambda *event: None)
        assert lax.psum(local.x, "i") == 6 and local.x == x
        return x

    ours.x = "the caller's"
    for schedule in ("one", "cores"):
        for _ in range(3):
            gpusim.pmap(f, "i", schedule=schedule)(np.arange(4))
    assert ours.x == "the caller's" and not hasattr(local, "x")


def test_a_replicas_context_is_of_no_use_in_the_thread_once_it_has_ended():
    import contextvars

    contexts = []

    def first(x):
        contexts.append(contextvars.copy_context())
        return x

    def second(x):
        with pytest.raises(RuntimeError, match="own thread"):
            contexts[0].run(lax.psum, x, "i")
        return x

    gpusim.pmap(first, "i", schedule="one")(np.arange(1))
    gpusim.pmap(second, "i", schedule="one")(np.arange(1))


class Held(np.ndarray):
    """An array that can be watched."""


@pytest.mark.parametrize("raises", [False, True])
def test_kept_threads_hold_nothing_of_the_last_call(raises):
    watched = []

    def f(x):
        mine = np.zeros(1000).view(Held)
        watched.append(weakref.ref(mine))
        total = lax.psum(x, "i")
        if raises and x == 1:
            raise ZeroDivisionError("by design")
        return total + mine

    with contextlib.suppress(gpusim.ReplicaError):
        gpusim.pmap(f, "i")(np.arange(6.0))
    # A thread may yet leave its last frame.
    assert until(lambda: gc.collect() >= 0 and not any(each() is not None for each in watched))
    assert len(watched) == 6


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("name", [None, "i"])
def test_arguments_and_results_are_in_no_cycle(name):
    watched = []

    def f(x):
        watched.append(weakref.ref(mine := np.ones(1000)))
        return lax.psum(mine, name) + x if name else mine

    x = np.ones((3, 1000))
    watched.append(weakref.ref(x))
    watched.append(weakref.ref(gpusim.pmap(f, name)(x)))
    del x
    # A thread may yet leave its last frame.
    assert until(lambda: [each() is None for each in watched] == [True] * 5)


def test_pmaps_from_several_threads_at_once():
    def inner(y):
        return lax.psum(y, ("i", "j"))

    def f(x):
        return gpusim.pmap(inner, "j")(x + np.arange(3)) + lax.psum(x, "i")

    expected = gpusim.pmap(f, "i")(np.arange(5))
    wrong = []

    def call():
        for _ in range(5):
            if not np.array_equal(gpusim.pmap(f, "i")(np.arange(5)), expected):
                wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and expected[0, 0] == 5 * 3 + 3 * 10 + 10


def test_a_forked_child_starts_threads_of_its_own():
    out = run(
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # of os.fork beside threads
        f = gpusim.pmap(lambda x: lax.psum(x, "i"), "i")
        expected = f(np.arange(6)).tolist()
        child = os.fork()
        if not child:
            os._exit(0 if f(np.arange(6)).tolist() == expected else 1)
        print(os.waitpid(child, 0)[1], f(np.arange(6)).tolist() == expected, flush=True)

        def forks(x):
            child = 0
            lax.psum(x, "i")
            if x == 1:
                child = os.fork()
                if not child:
                    found = []
                    thread = threading.Thread(target=lambda: found.append(f(np.arange(6))))
                    thread.start()
                    thread.join()
                    os._exit(0 if found[0].tolist() == expected else 1)
                assert os.waitpid(child, 0)[1] == 0
            return lax.psum(x, "i")
        print(gpusim.pmap(forks, "i")(np.arange(3)).tolist())
        """
    )
    assert out == "0 True\n[3, 3, 3]\n"


def test_idle_threads_end_after_a_while_and_no_more_are_kept_than_the_limit():
    out = run(
        """
        workers.IDLE_SECONDS, workers.MOST_IDLE = 100_000, 10
        def idle():
            return sum(thread.name == workers.IDLE_NAME for thread in threading.enumerate())
        gpusim.pmap(lambda x: lax.psum(x, "i"), "i")(np.arange(40))
        while idle() > 10:
            time.sleep(0.01)
        assert 0 < idle() <= 10
        workers.IDLE_SECONDS = 0.5  # all are used again, and wait that long after it
        gpusim.pmap(lambda x: lax.psum(x, "i"), "i")(np.arange(40))
        while idle():
            time.sleep(0.01)
        print(idle(), workers._pool._count)
        """
    )
    assert out == "0 0\n"


def test_idle_threads_do_not_delay_the_end_of_the_process():
    out = run(
        """
        workers.IDLE_SECONDS = 100_000  # an end that waits for idle threads would hang
        gpusim.pmap(lambda x: lax.psum(x, "i"), "i")(np.arange(100))
        print("idle")
        """
    )
    assert out == "idle\n"


# --- numbers --------------------------------------------------------------------------------------


def test_an_absurd_number_of_replicas_is_refused_at_once(monkeypatch):
    def start(job):
        raise AssertionError("a thread is started")

    monkeypatch.setattr(workers, "start", start)
    with pytest.raises(gpusim.GpusimError, match=r"10000000 threads.*vmap") as caught:
        gpusim.pmap(lambda x: lax.psum(x, "i"), "i", axis_size=10_000_000)()
    assert "without an axis_name" in str(caught.value)


def test_the_limit_is_the_machines():
    out = run(
        """
        import resource
        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        resource.setrlimit(resource.RLIMIT_NPROC, (1000, hard))
        try:
            gpusim.pmap(lambda x: lax.psum(x, "i"), "i")(np.arange(2000))
        except gpusim.GpusimError as error:
            print(error)
        print(gpusim.pmap(lambda x: 2 * x)(np.arange(2000)).sum())  # it needs no thread each
        """
    )
    assert "this machine allows about 936 (ulimit -u)" in out
    assert out.endswith("\n3998000\n")


def test_a_map_that_reaches_the_limit_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(workers, "_pool", workers._Pool())
    monkeypatch.setattr(workers, "_bounds", lambda: [("the test's", 20 + workers.RESERVED)])
    with pytest.raises(gpusim.GpusimError, match=r"could not start .* \(it has 20 threads already"):
        gpusim.pmap(lambda x: lax.psum(x, "i"), "i")(np.arange(40))


@pytest.mark.parametrize("size", slow(4096))
def test_thousands_of_replicas_meet(size):
    found = gpusim.pmap(lambda x: lax.psum(x, "i"), "i", out_axes=None)(np.ones(size))
    assert found == size
