"""Where two runs begin to differ: planted differences, on simulated ranks and against gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpusim import Reduction
from gpusim.tools.compare.comparing import Comparison, compare
from gpusim.tools.compare.report import sentences
from gpusim.tools.compare.runs import Call, Run, read
from gpusim.torch.distributed import Recorder, launch
from tests.tools import planted

ROOT = Path(__file__).parents[2]
EVERYTHING = range(10_000)


def simulated(folder: Path, name: str, plant: str = "none", reduction: Any = "gloo-ring") -> Run:
    """The record of a simulated run."""
    recorder = Recorder(folder / name, arrays=EVERYTHING)
    launch(lambda rank: planted.train(plant), planted.RANKS, recorder=recorder, reduction=reduction)
    return read(folder / name)


@dataclass(frozen=True)
class Planted:
    """A pair of runs, and the verdict that is expected of it."""

    name: str
    kind: str
    mark: str  # of the line in the program
    nth: int = 0  # call of the rank at that line
    rank: int = 0
    plants: tuple[str, str] = ("none", "none")
    reductions: tuple[Any, Any] = ("gloo-ring", "gloo-ring")
    folds: tuple[str, str] | None = None
    differs: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (0, 1, 2, 3)


def fold(
    name: str, a: Any, b: Any, names: tuple[str, str], plant: str = "none", **more: Any
) -> Planted:
    mark = more.pop("mark", "backward")
    return Planted(
        name, "collective", mark, plants=(plant, plant), reductions=(a, b), folds=names, **more
    )


def plant(name: str, kind: str, mark: str, *place: int, **more: Any) -> Planted:
    return Planted(name, kind, mark, *place, plants=("none", name), **more)


def scattered(order: str) -> Any:
    """A chooser that has another order for the reduce-scatter only."""
    return lambda call: order if call.operation == "reduce_scatter" else "gloo-ring"


WIDE = Reduction(accumulate="float64")
#: Differences of the program. DDP reduces one bucket in the first step, two in the others.
PROGRAMS = [
    plant("seed", "operands", "backward", 0, 1, ranks=(1,)),
    plant("split", "other", "exchange", 1, differs=("splits",)),
    plant("missing", "missing", "norm", 1),
    plant("doubled", "additional", "norm", 2),
    # DDP broadcasts the sizes of the new buckets before it uses them.
    plant("bucket", "operands", "forward", ranks=(0,)),
    plant("input-cast", "operands", "backward", 1),
    plant("epsilon", "operands", "backward", 1),
]
PAIRS = [
    fold("linear-tree", "linear", "tree", ("linear", "tree")),
    fold("linear-reverse", "linear", "reverse", ("linear", "reverse")),
    fold("gloo-nccl", "gloo-ring", "nccl-ring", ("gloo-ring", "nccl-ring")),
    fold("ring-tree", "nccl-ring", "nccl-tree", ("nccl-ring", "nccl-tree")),
    fold("mpich", "linear", "mpich", ("linear", "mpich")),
    fold("float64", "linear", WIDE, ("linear", "linear, in float64")),
    fold(
        "bfloat16",
        "linear",
        Reduction(accumulate="bfloat16"),
        ("linear", "linear, in bfloat16"),
        "bfloat16",
    ),
    fold("hops", "linear", "gloo-ring", ("linear", "gloo-ring"), "bfloat16"),
    fold(
        "scatter",
        scattered("linear"),
        scattered("ring"),
        ("linear", "ring"),
        "sharded",
        mark="shards",
        rank=1,
        ranks=(1, 2, 3),
    ),
    *PROGRAMS,
    plant("late-seed", "operands", "backward", 1, 2, ranks=(2,)),
    plant("doubled-line", "additional", "again"),
    plant("metric-cast", "other", "metric", 1, differs=("dtypes",)),
    plant("decay", "operands", "backward", 1),
    plant("cut", "other", "cut", 1, differs=("buckets",)),
]
#: The same against real gloo processes: a fold each, and each difference of the program.
AGAINST_GLOO = [
    fold("gloo-linear", "gloo-ring", "linear", ("gloo-ring", "linear")),
    fold("gloo-nccl", "gloo-ring", "nccl-ring", ("gloo-ring", "nccl-ring")),
    fold("gloo-float64", "gloo-ring", WIDE, ("gloo-ring", "linear, in float64")),
    *PROGRAMS,
]


def line_of(mark: str) -> str:
    """The place of the line of the program with this comment."""
    source = Path(planted.__file__).read_text().splitlines()
    (number,) = [k for k, line in enumerate(source, 1) if line.endswith(f"# {mark}")]
    return f"{planted.__file__}:{number}"


def call_at(run: Run, pair: Planted) -> Call:
    """The call at which the difference was planted."""
    site = line_of(pair.mark)
    calls = [e.calls[pair.rank] for e in run.events if e.calls[pair.rank].site == site]
    return calls[pair.nth]


def check(found: Comparison, pair: Planted) -> None:
    """The verdict is the one that is expected, at the planted place."""
    verdict = found.verdict
    assert verdict is not None
    told = "\n".join(sentences(found))
    assert (verdict.kind, verdict.differs) == (pair.kind, pair.differs), told
    for name, run, call in (("a", found.a, verdict.a), ("b", found.b, verdict.b)):
        lacks = {"missing": "b", "additional": "a"}.get(pair.kind)
        assert call is (None if name == lacks else call_at(run, pair)), told
    if pair.kind in ("operands", "collective"):
        assert verdict.ranks == pair.ranks
        assert verdict.difference is not None
        assert verdict.difference.differing > 0
    if pair.kind == "operands":
        assert verdict.before_a is not None
        assert verdict.before_b is not None
        for run, near, call in (
            (found.a, verdict.before_a, verdict.a),
            (found.b, verdict.before_b, verdict.b),
        ):
            assert call is not None
            assert (near.rank, near.sequence) == (call.rank, call.sequence - 1)
            assert near in [event.calls.get(near.rank) for event in run.events]
    if pair.folds is not None:
        for name, expected in zip("ab", pair.folds, strict=True):
            assert expected in (verdict.folds[name] or []), (name, verdict.folds[name])
            assert expected not in (verdict.folds["b" if name == "a" else "a"] or [])


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_planted_place_and_fold_are_found(pair: Planted, tmp_path: Path) -> None:
    a, b = (
        simulated(tmp_path, name, *about)
        for name, *about in zip("ab", pair.plants, pair.reductions, strict=True)
    )
    check(compare(a, b), pair)
    assert compare(a, a).verdict is None


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of real processes: without a difference, and with each of the program's."""
    folder = tmp_path_factory.mktemp("gloo")
    plants = ["none", *(pair.plants[1] for pair in PROGRAMS)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.tools.planted", str(folder), *plants]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("pair", AGAINST_GLOO, ids=lambda pair: pair.name)
def test_the_planted_place_is_found_against_gloo(pair: Planted, gloo: Path, tmp_path: Path) -> None:
    real = read(gloo / "none")
    check(compare(real, simulated(tmp_path, "b", pair.plants[1], pair.reductions[1])), pair)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", *(pair.plants[1] for pair in PROGRAMS)])
def test_gloos_record_is_that_of_its_twin(name: str, gloo: Path, tmp_path: Path) -> None:
    found = compare(read(gloo / name), simulated(tmp_path, "b", name))
    assert found.verdict is None, sentences(found)
    assert all(row.operands == row.results == 0 for row in found.rows)
