"""What `gpusim equal` says of simulated ranks is what it would say of torchrun's processes."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gpusim.tools.equal.comparing import compare
from gpusim.tools.equal.report import record
from gpusim.tools.equal.settings import Settings
from gpusim.tools.equal.traces import Trace, read
from tests.equal.__main__ import PROGRAMS, environment, said
from tests.equal.bug import Bug
from tests.equal.cases import BUGS, CORRECT
from tests.equal.test_bugs import name_of
from tests.oracles.machine_time import PATIENCE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are processes of Linux"),
]

WRONG = {
    ("tensor_parallel.py", "output-not-reduced"),
    ("zero.py", "norms-added"),
    ("fsdp.py", "replicas-not-reduced"),
    ("pipeline_hand.py", "tied-not-summed"),
    ("context_parallel.py", "positions-local"),
    ("experts.py", "counts-local"),
}
RIGHT = (("sequence_parallel.py --tp 2", 4), ("pipeline_torch.py", 2), ("fsdp.py --version 1", 2))


def traced(program: str, ranks: int, folder: Path) -> Trace:
    """The trace of a program in processes of torchrun's.

    Some of them may abort at their end, as PyTorch's groups do on some machines: all is written.
    """
    folder.mkdir()
    script, *arguments = shlex.split(program)
    settings = json.dumps(asdict(Settings(str(folder), steps=0)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "gpusim.tools.equal.recording"]
    done = subprocess.run(
        [*command, settings, str(PROGRAMS / script), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    trace = read(folder)
    assert all(own.end for own in trace.by_rank), done.stdout + done.stderr
    return trace


def in_processes(program: str, ranks: int, folder: Path) -> dict[str, Any]:
    reference = traced(program, 1, folder / "reference")
    return record(compare(reference, traced(program, ranks, folder / "candidate")))


def named(found: dict[str, Any]) -> tuple[Any, ...] | None:
    first = found["first"]
    return first and tuple(first[key] for key in ("what", "name", "leaf", "step", "reason"))


CASES = [bug for bug in BUGS if (bug.program, bug.bug) in WRONG]


@pytest.mark.parametrize("bug", CASES, ids=[name_of(bug.command, bug.ranks) for bug in CASES])
def test_bug_is_found_in_the_same_tensor(bug: Bug, tmp_path: Path) -> None:
    simulated = said(bug.command, bug.ranks, "--steps", "0")
    assert simulated["code"] == 1, simulated["output"]
    real = in_processes(bug.command, bug.ranks, tmp_path)
    assert named(real) == named(simulated)
    assert real["first"]["ranks_right"] == simulated["first"]["ranks_right"]


@pytest.mark.parametrize(
    ("program", "ranks"), RIGHT, ids=[name_of(program, ranks) for program, ranks in RIGHT]
)
def test_correct_program_has_the_same_relations(program: str, ranks: int, tmp_path: Path) -> None:
    assert (program, ranks) in CORRECT
    simulated = said(program, ranks, "--steps", "0")
    assert simulated["code"] == 0, simulated["output"]
    real = in_processes(program, ranks, tmp_path)
    assert real["equal"] is True
    assert real["tensors"] == simulated["tensors"]
    assert real["relations"] == simulated["relations"]


def test_sample_is_in_the_tables() -> None:
    assert {(bug.program, bug.bug) for bug in CASES} == WRONG
