"""The lanes: how much of the suite a run takes, and where each part of it runs.

`python -m tests` reads these tables; make's targets call it.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Lane:
    name: str
    budget: float  # the share of each random budget
    slow: bool  # whether tests marked slow run
    sampled: bool  # whether SHARES apply


LANES = {
    lane.name: lane
    for lane in (
        Lane("change", budget=0.1, slow=False, sampled=True),  # make test, .ci/run
        Lane("area", budget=0.1, slow=False, sampled=False),  # make test AREA=, pytest by hand
        Lane("all", budget=1.0, slow=True, sampled=False),  # make test-all
    )
}

#: The share of a folder's or file's quick tests that `make test` takes; the seed draws which. A
#: claim with many cases has some in each run. What changes seldom touch has small shares: work on
#: it runs `make test AREA=`, and `make test-all` runs everything.
SHARES = {
    "tests/check": 0.2,
    "tests/check/test_page.py": 0.2,
    "tests/check/test_planted.py": 0.15,  # each is a run of the command
    "tests/collectives": 0.3,
    "tests/compare/test_pairs.py": 0.15,  # each takes seconds
    "tests/compiled": 0.5,
    "tests/contract": 0.3,
    "tests/cuda": 0.25,
    "tests/equal": 0.025,  # each takes seconds
    "tests/equal/test_tables.py": 1.0,
    "tests/faults": 0.2,
    "tests/fuzz": 0.25,  # each is a process
    "tests/gpu": 0.25,
    "tests/jax": 0.4,
    "tests/maps": 0.3,
    "tests/poptorch": 0.12,
    "tests/popxl": 0.12,
    "tests/project/test_examples.py": 0.2,
    "tests/project/test_ports.py": 0.15,
    "tests/project/test_release_platforms.py": 0.3,  # each takes seconds
    "tests/resume": 0.2,  # each takes seconds
    "tests/resume/test_programs.py": 0.2,
    "tests/tools": 0.3,
    "tests/tools/test_equal.py": 0.15,  # each takes seconds
    "tests/tools/test_equal_programs.py": 0.1,
    "tests/tools/test_testing_cases.py": 0.15,
    "tests/torch": 0.3,
    "tests/torch/test_dispatcher.py": 0.2,
    "tests/torch/test_distributed_apart.py": 0.2,
    "tests/torch/test_distributed_bits.py": 1.0,  # a sample by itself
    "tests/worlds": 0.2,
}

#: Work on one area: its own folders, and the quick tests of what it rests on.
AREAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "numerics": (
        ("tests/contract", "tests/compiled", "gpusim/fallback"),
        ("tests/collectives/test_direct.py",),
    ),
    "cuda": (("tests/cuda", "tests/gpu"), ("tests/contract",)),
    "collectives": (("tests/collectives",), ("tests/contract", "tests/maps/test_pmap.py")),
    "maps": (("tests/maps",), ("tests/collectives",)),
    "worlds": (("tests/worlds",), ("tests/collectives",)),
    "torch": (
        (
            "tests/torch",
            "tests/check",
            "tests/faults",
            "tests/resume",
            "tests/tools/test_ci_recipe.py",
            "tests/tools/test_equal*.py",
            "tests/tools/test_run.py",
            "tests/tools/test_skill.py",
            "tests/tools/test_torchrun*.py",
            "tests/tools/test_testing*.py",
        ),
        ("tests/maps/test_pmap*.py", "tests/collectives/test_direct.py"),
    ),
    "jax": (("tests/jax",), ("tests/collectives",)),
    "ipu": (
        (
            "tests/check/test_host_reads.py",
            "tests/devices",
            "tests/poptorch",
            "tests/popxl",
            "tests/gpu/test_pea.py",
            "tests/gpu/test_pop*.py",
            "tests/tools/test_aliases.py",
            "tests/tools/test_schedule.py",
            "tests/worlds/test_popdist.py",
            "tests/worlds/test_poprun.py",
            "gpusim/aliases.py",
            "gpusim/devices",
            "gpusim/popart",
            "gpusim/popdist",
            "gpusim/poptorch",
            "gpusim/poptorch_experimental_addons",
            "gpusim/popxl",
            "gpusim/tools/launch",
            "gpusim/tools/schedule.py",
        ),
        ("tests/torch/test_torch.py",),
    ),
    "tools": (
        ("tests/tools", "tests/equal", "tests/compare"),
        ("tests/contract/test_reduction.py",),
    ),
    "project": (("tests/project", "tests/oracles", "tests/fuzz", "gpusim"), ()),
}

#: Tests that fork this process, or compare with real processes of torch or MPI. They run in a
#: pytest call of their own: a child of a process that holds threads of XLA or OpenMP may hang.
FORKS = (
    "gpusim/equal.py",  # a doctest
    "gpusim/poptorch/data",  # a doctest
    "tests/check",
    "tests/compare",
    "tests/contract/test_memory.py",
    "tests/contract/test_wire_twins.py",
    "tests/devices/test_attaching.py",
    "tests/equal",
    "tests/faults",
    "tests/gpu/test_torch_one_gpu.py",
    "tests/poptorch/test_poptorch_accessor.py",
    "tests/poptorch/test_poptorch_data.py",
    "tests/poptorch/test_poptorch_instances.py",
    "tests/poptorch/test_poptorch_profiling.py",
    "tests/project/test_docs.py",
    "tests/resume",
    "tests/tools/reveal/test_reveal_engines.py",
    "tests/tools/test_ci_recipe.py",
    "tests/tools/test_equal.py",
    "tests/tools/test_equal_check.py",
    "tests/tools/test_equal_programs.py",
    "tests/tools/test_one_spelling.py",
    "tests/tools/test_record.py",
    "tests/tools/test_run.py",
    "tests/tools/test_skill.py",
    "tests/tools/test_testing*.py",
    "tests/tools/test_torchrun*.py",
    "tests/tools/test_twins.py",
    "tests/torch",
    "tests/worlds",
)
#: Which of the two calls this is: "forks", "plain", or "" for a pytest that was called by hand.
PART = os.environ.get("GPUSIM_TESTS_PART", "")

LANE = LANES[os.environ.get("GPUSIM_TESTS") or "area"]
#: Whether this run is `make test-all`: with the tests marked slow and the full random budgets.
FULL = LANE.slow


def _commit() -> str:
    """The commit's hash, shortened; 0 in a copy without its repository, or without git."""
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "0"
    return done.stdout.strip()[:8] if done.returncode == 0 else "0"


#: The seed of hypothesis and of all random programs: the commit's, so that each draws others, and
#: a failure can be repeated with SEED=.
SEED = int(os.environ.get("GPUSIM_TESTS_SEED") or int(_commit(), 16))
os.environ["GPUSIM_TESTS_SEED"] = str(SEED)  # also of processes that tests start


def forks(path: Path) -> bool:
    """Return whether a file's tests belong to the part that forks."""
    return any(each.match(pattern) for each in (path, *path.parents) for pattern in FORKS)


def budget(full: int, *, least: int = 1, most: int | None = None) -> int:
    """Return how many of `full` random examples a test draws in this run.

    At least `least`, and at most `most` unless the run is full.
    """
    count = max(least, round(full * LANE.budget))
    return count if FULL or most is None else min(count, most)


def seeds(count: int, *, first: Sequence[int] = ()) -> list[int]:
    """Return `count` seeds of random programs, after the `first`: those that once found a fault."""
    return [*first, *(SEED * 1_000_003 + number & 0x7FFFFFFF for number in range(count))]


def sample(names: Sequence[str]) -> list[str]:
    """Return the tests that this run takes: in `make test` each area's share of each claim's cases.

    Of a claim with n cases it takes n times the share, rounded up or down by chance.
    """
    if not LANE.sampled:
        return list(names)
    claims: dict[str, list[str]] = {}
    for name in names:
        claims.setdefault(name.partition("[")[0], []).append(name)
    found = []
    for claim, cases in claims.items():
        file = claim.partition("::")[0]
        share = SHARES.get(file, SHARES.get("/".join(file.split("/")[:2]), 1.0))
        draw = random.Random(f"{SEED} {claim}")
        expected = len(cases) * share
        count = int(expected + draw.random())
        found += draw.sample(cases, count)
    return found


def slow(*cases: Any) -> list[Any]:
    """Mark cases of a parametrized test as slow; a tuple is a case with several parameters."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
