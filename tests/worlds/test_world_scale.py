"""Worlds of thousands of replicas, and of large arrays: what they take of time and memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpusim.tools.launch import mpirun
from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]
INSTANCES = 4


def start(*program: str) -> str:
    """The output of a program under mpirun."""
    command = [mpirun.find(), "-n", str(INSTANCES), "--oversubscribe", "--allow-run-as-root"]
    done = subprocess.run(
        [*command, sys.executable, "-m", *program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def numbers(printed: str) -> dict[str, float]:
    """The largest of each name, over the instances."""
    found: dict[str, float] = {}
    for name, number in re.findall(r"^(.+): ([\d.]+)$", printed, re.M):
        found[name] = max(found.get(name, 0.0), float(number))
    return found


@pytest.mark.slow
def test_no_collective_takes_three_times_its_inputs_and_outputs() -> None:
    taken = numbers(start("tests.worlds.memory", "32"))
    assert len(taken) > 10
    assert {name: many for name, many in taken.items() if many > 3} == {}


def test_five_hundred_replicas_need_no_work_for_each_pair_of_them() -> None:
    """In Python a quarter of a million pairs would take seconds."""
    taken = numbers(start("tests.worlds.many", "512"))
    assert len(taken) > 10
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert {name: seconds for name, seconds in taken.items() if seconds > 1.5 * busy} == {}
