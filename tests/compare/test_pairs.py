"""Each planted pair: the stated place is never false, the cause's class is right, text is JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compare.pair import Pair
from tests.compare.pairs import MISSED, PAIRS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are processes of Linux")

ROOT = Path(__file__).parents[2]
#: One of each kind of cause, one of them with real processes.
QUICK = (
    "one-gradient-tripled",
    "as-gloo",
    "gloo-and-nccl",
    "rate",
    "sum-skipped",
    "smaller-buckets",
    "gradients-through-bfloat16",
    "ranks-swapped",
)


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, id=pair.name, marks=[pytest.mark.slow] * (pair.name not in QUICK))
        for pair in PAIRS
    ],
)
def test_comparison_is_true(pair: Pair, tmp_path: Path) -> None:
    """No place, rank or proven cause is false; the class is right, unless it is a known miss."""
    file = tmp_path / "outcome.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.compare", "--name", pair.name, "--json", str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    assert file.exists(), output
    (outcome,) = json.loads(file.read_text())
    assert outcome["judged"] is not None, output
    assert outcome["judged"]["false"] == [], output
    assert outcome["judged"]["mismatches"] == [], output
    assert outcome["judged"]["right"] == (pair.name not in MISSED), output


def test_tables_are_sound() -> None:
    """At least 40 pairs, ten with real processes; at least nine in ten have the right class."""
    names = [pair.name for pair in PAIRS]
    assert len(set(names)) == len(names) >= 40
    assert sum(pair.real for pair in PAIRS) >= 10
    assert {*MISSED, *QUICK} <= set(names)
    assert len(MISSED) <= len(PAIRS) // 10
    for pair in PAIRS:
        a, b = pair.texts()
        assert pair.says and (a != b or pair.effect is None or pair.a.ranks != pair.b.ranks)
        assert pair.equal or pair.effect is not None or pair.classes == ("rounding",)
