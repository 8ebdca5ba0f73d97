"""Real ranks over gloo, and simulated ones, around the same death: each survivor sees the same."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .real.cases import DEFERRED, KINDS, Case

RANKS = Path(__file__).parent / "real/ranks.py"

QUICK = [Case(4, kind, 2) for kind in KINDS]

#: Kinds whose call is complete for some ranks, though others are missing.
ROOTED = [kind for kind in KINDS if kind.startswith(("broadcast ", "gather ", "scatter "))]

SLOW = [
    *(Case(4, kind, 0) for kind in KINDS),
    *(Case(ranks, kind, 1) for ranks, kind in itertools.product((2, 3), KINDS)),
    *(Case(4, kind, 2, "kill", True) for kind in DEFERRED),
    *(Case(4, kind, 2, "hang") for kind in KINDS),
    *(Case(4, kind, 0, "hang") for kind in ROOTED),
    *(Case(3, kind, 1, "hang") for kind in (*ROOTED, "monitored_barrier")),
    *(Case(5, "broadcast 1", dead, "hang") for dead in (0, 3, 4)),
    *(
        Case(4, kind, 2, how)
        for kind, how in itertools.product(("all_reduce", "barrier", *ROOTED), ("exit", "raise"))
    ),
]

Run = Callable[[Case], dict[str, Any]]


@pytest.fixture(scope="module")
def real() -> Iterator[Run]:
    """Runs a case on real ranks, which a process of its own forks."""
    ranks = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(RANKS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
    )
    assert ranks.stdin is not None and ranks.stdout is not None

    def run(case: Case) -> dict[str, Any]:
        terms = [case.ranks, case.kind, case.dead, case.how, case.deferred]
        ranks.stdin.write(json.dumps(terms) + "\n")
        ranks.stdin.flush()
        result: dict[str, Any] = json.loads(ranks.stdout.readline())
        return result

    yield run
    ranks.stdin.close()
    assert ranks.wait() == 0


@pytest.mark.parametrize(
    "case",
    [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_survivors_see_the_same(case: Case, real: Run) -> None:
    from .real import simulated
    from .real.comparing import differences

    assert differences(case, real(case), simulated.run(case)) == []
