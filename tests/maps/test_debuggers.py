"""Profilers, tracers, coverage and pdb work while pmap runs and after it.

Each runs in a process of its own, as a failure is a hang of the whole interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.oracles.machine_time import PATIENCE

PROGRAM = """
import faulthandler, os, signal, sys, threading, time
faulthandler.dump_traceback_later({limit}, exit=True)
import numpy as np, gpusim
from gpusim import lax

def work(x):
    return x + 1

def completes(x):
    return lax.psum(work(x), "i")

def fails(x):
    if x == 0:
        time.sleep(0.01)
        raise ZeroDivisionError("by design")
    while True:
        work(x)

def is_interrupted(x):
    if x == 0:
        os.kill(os.getpid(), signal.SIGINT)
    while True:
        work(x)

def returns_early(x):
    return work(x) if x == 0 else lax.psum(x, "i")

def returns_early_while_another_runs(x):
    if x == 1:
        raise ZeroDivisionError("by design")
    try:
        lax.psum(x, "i")
    finally:
        time.sleep(0.2)  # the exception is posted while this one waits in C

def run(case):
    print("pmap of", case.__name__, flush=True)
    for schedule in ("one", "cores"):
        f = gpusim.pmap(case, "i", schedule=schedule)
        if case is completes:
            assert f(np.arange(3)).tolist() == [6, 6, 6]
        else:
            try:
                f(np.arange(3))
            except (gpusim.ReplicaError, gpusim.DeadlockError, KeyboardInterrupt):
                pass
            else:
                raise AssertionError(case)

def waits_in_a_library(x):
    if x == 0:
        raise ZeroDivisionError("by design")
    while not threading.Event().wait(0.02):
        pass

CASES = [completes, fails, is_interrupted, returns_early, returns_early_while_another_runs]
CASES += [waits_in_a_library]
seen = set()  # names of functions, and the threads that called them

def record(frame, event, arg):
    seen.add((frame.f_code.co_name, threading.current_thread() is threading.main_thread()))
    return record
"""

TOOLS = {
    "cProfile": """
import cProfile
profiler = cProfile.Profile()
start = profiler.enable
def stop():
    profiler.disable()
    seen.update((entry.code.co_name, True) for entry in profiler.getstats()
                if not isinstance(entry.code, str))
""",
    "sys.setprofile": """
start, stop = (lambda: sys.setprofile(record)), (lambda: sys.setprofile(None))
""",
    "sys.settrace": """
start, stop = (lambda: sys.settrace(record)), (lambda: sys.settrace(None))
""",
    "threading.setprofile": """
def start():
    threading.setprofile(record)
    sys.setprofile(record)
def stop():
    threading.setprofile(None)
    sys.setprofile(None)
""",
    "threading.settrace": """
def start():
    threading.settrace(record)
    sys.settrace(record)
def stop():
    threading.settrace(None)
    sys.settrace(None)
""",
    "coverage": """
import coverage, inspect
measured = coverage.Coverage(data_file=None, include=[__file__])
start = measured.start
def stop():
    measured.stop()
    lines = measured.get_data().lines(__file__) or []
    for function in [*CASES, work]:
        source, first = inspect.getsourcelines(function)
        if any(first < line < first + len(source) for line in lines):
            seen.update({(function.__name__, True), (function.__name__, False)})
""",
}

SEES_REPLICAS = ["threading.setprofile", "threading.settrace", "coverage"]


def run_process(command: list[str], stdin: str = "") -> str:
    """The output of a process, which fails the test if it fails or does not end."""
    environment = {name: v for name, v in os.environ.items() if not name.startswith("COV")}
    process = subprocess.run(
        [sys.executable, *command],
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        timeout=PATIENCE,
    )
    if "Timeout" in process.stdout:
        pytest.fail(f"the process hung:\n{process.stdout}")
    assert process.returncode == 0, process.stdout
    return process.stdout


def write_program(folder: Path, *parts: str) -> str:
    path = folder / "program.py"
    path.write_text("\n".join([PROGRAM.format(limit=PATIENCE / 2), *map(textwrap.dedent, parts)]))
    return str(path)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_that_starts_after_pmap_works(tmp_path, tool):
    ending = """
        for case in CASES:
            run(case)
            start()
            assert work(1) == 2
            stop()
            assert ("work", True) in seen
            seen.clear()
        print("done")
    """
    assert run_process([write_program(tmp_path, TOOLS[tool], ending)]).endswith("done\n")


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_that_runs_during_pmap_works(tmp_path, tool):
    ending = f"""
        for case in CASES:
            seen.clear()
            start()
            run(case)
            stop()
            if {tool in SEES_REPLICAS}:
                assert (case.__name__, False) in seen
        print("done")
    """
    out = run_process([write_program(tmp_path, TOOLS[tool], ending)])
    assert "done\n" in out, out
    if sys.version_info[:3] != (3, 13, 0):  # which may print an ignored exception when it exits
        assert out.endswith("done\n"), out


@pytest.mark.parametrize("case", ["completes", "fails", "is_interrupted", "returns_early"])
def test_pdb_stops_before_and_after_a_pmap(tmp_path, case):
    ending = f"""
        def main():
            before = 40
            run({case})
            after = before + 2
            return work(after)
        main()
        print("done")
    """
    commands = ["b main", "c", "n", "p before", "n", "p 'pmap is over'", "n", "p after"]
    commands += ["b work", "c", "p 'in work', x", "c", "q"]
    program = write_program(tmp_path, ending)
    out = run_process(["-m", "pdb", program], "\n".join(commands) + "\n")
    for line in ["(Pdb) 40", "(Pdb) 'pmap is over'", "(Pdb) 42", "(Pdb) ('in work', 42)", "done"]:
        assert line in out, out


@pytest.mark.parametrize("schedule", ["one", "cores"])
def test_pdb_stops_inside_a_replica(tmp_path, schedule):
    ending = f"""
        def looks(x):
            if x == 1:
                breakpoint()
            doubled = 2 * x
            return lax.psum(doubled, "i")
        assert gpusim.pmap(looks, "i", schedule="{schedule}")(np.arange(3)).tolist() == [6, 6, 6]
        breakpoint()
        print("sum", work(0))
    """
    commands = ["n", "n", "p 'in', x", "p 'local', int(doubled)", "b work", "c"]
    commands += ["p 'back in main'", "b work", "c", "p 'in work', x", "c"]
    out = run_process([write_program(tmp_path, ending)], "\n".join(commands) + "\n")
    for line in ["('in', array(1))", "('local', 2)", "'back in main'", "('in work', 0)", "sum 1"]:
        assert line in out, out


def test_quitting_pdb_inside_a_replica_ends_the_others(tmp_path):
    ending = """
        def looks(x):
            if x == 1:
                breakpoint()
            return lax.psum(x, "i")
        try:
            gpusim.pmap(looks, "i")(np.arange(3))
        except gpusim.ReplicaError as error:
            print("ended:", error)
        breakpoint()
        print("done")
    """
    if sys.version_info >= (3, 14):  # quit asks, and later breakpoints in other threads do not stop
        answers, expected = "n\nq\ny\n", ["SystemExit", "done"]
    else:
        answers, expected = "n\nq\np 'back in main'\nc\n", ["BdbQuit", "'back in main'", "done"]
    out = run_process([write_program(tmp_path, ending)], answers)
    for line in [f"ended: replica 1 of axis 'i' raised {expected[0]}", *expected[1:]]:
        assert line in out, out
