"""Each example runs as a script, and agrees with its single-device reference for other sizes."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracles.budget import slow
from tests.oracles.machine_time import PATIENCE

EXAMPLES = Path(__file__).parents[2] / "examples"
LONG = EXAMPLES / "poptorch_digits.py"  # in a short run also with other sizes, below
OTHERS = sorted(set(EXAMPLES.glob("*.py")) - {LONG})


@pytest.mark.parametrize("path", [*OTHERS, *slow(LONG)], ids=lambda path: path.stem)
def test_runs_as_a_script(path: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, path]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("agreed")


@pytest.mark.parametrize(
    "command",
    [
        "data_parallel --replicas 1",
        "data_parallel --replicas 7 --steps 3",
        "fsdp2_reduction --ranks 3 6 --width 20",
        "moe_dispatch --replicas 1 --experts 3",
        "moe_dispatch --replicas 3 --experts 1",
        "moe_dispatch --replicas 3 --experts 2 --skew 100",  # all tokens to one expert
        "moe_dispatch --replicas 6 --experts 3 --tokens 1",  # most slices are empty
        "poptorch_digits --replicas 1 --calls 2",
        *slow("poptorch_digits --replicas 16 --calls 2"),  # all IPUs that there are
        "ring_attention --replicas 1",
        "ring_attention --replicas 1 --causal",
        "ring_attention --replicas 3",
        "ring_attention --replicas 6 --block 1 --causal",
    ],
)
def test_agrees_whatever_the_sizes(command: str) -> None:
    name, *arguments = command.split()
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](arguments)
