"""Programs that go on after a rank's death: gpusim shows what real torchrun with gloo showed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .test_real_torchrun import report_of

PROGRAMS = Path(__file__).parent / "programs"

SHRINK = [
    *(f"rank {rank} step 0: 6.0" for rank in range(3)),
    *(f"rank {rank} step 1: True" for rank in range(2)),
    *(f"rank {rank} step {step}: 3.0" for rank in range(2) for step in (1, 2, 3)),
]

NESTED = [
    *(f"rank {rank} step 0 row: {3.0 if rank < 2 else 7.0}" for rank in range(4)),
    *(f"rank {rank} step 0 column: {6.0 if rank % 2 else 4.0}" for rank in range(4)),
    *(f"rank {rank} step {step} row: 7.0" for rank in (2, 3) for step in (1, 2)),
    *(f"rank {rank} step {step} column: 4.0" for rank in (0, 2) for step in (1, 2)),
    *(f"rank 0 step {step} row: RuntimeError" for step in (1, 2)),
    *(f"rank 3 step {step} column: RuntimeError" for step in (1, 2)),
]

RETRIES = [f"rank {rank} fails {attempt}" for rank in (0, 2) for attempt in range(3)]


@pytest.mark.parametrize(
    ("name", "ranks", "plan", "lines", "codes"),
    [
        ("shrink", 3, "kill rank=2 call=2", SHRINK, {"2": "-9"}),
        pytest.param(
            "nested", 4, "exit rank=1 call=3 code=3", NESTED, {"1": "3"}, marks=pytest.mark.slow
        ),
        pytest.param(
            "retries",
            3,
            "kill rank=1 call=1",
            RETRIES,
            {"0": "17", "1": "-9", "2": "17"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_programs_that_go_on(
    name: str, ranks: int, plan: str, lines: list[str], codes: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "gpusim.tools.cli", "torchrun", f"--nproc-per-node={ranks}"]
    command += ["--faults", plan, str(PROGRAMS / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    root, found = report_of(done.stderr)
    shown = [re.sub(r"^\[rank\d+\]: ", "", line) for line in done.stdout.splitlines()]
    assert (done.returncode, sorted(shown)) == (1, sorted(lines)), done.stderr[-2000:]
    dead = re.search(r"rank=(\d+)", plan)
    assert dead is not None and root is not None and root[0] == dead[1]
    assert found == codes
