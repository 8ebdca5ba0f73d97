"""The parts of `gpusim compare`: the diff of calls, ulps, and the order of events."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpusim.tools.compare.alignment import LARGEST, align, purity
from gpusim.tools.compare.difference import difference
from gpusim.tools.compare.runs import read
from tests.oracles.budget import SEED, budget


def longest(a: str, b: str) -> int:
    """The length of the longest common subsequence."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = (
                table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
            )
    return table[-1][-1]


@pytest.mark.parametrize("sign", [1, -1])
def test_alignments_have_the_fewest_edits(sign: int) -> None:
    """For both places of an edit: the latest, and the earliest, which the score prefers."""
    draw = random.Random(SEED + sign)
    for _ in range(budget(20_000, most=400)):
        a, b = ("".join(draw.choices("abc", k=draw.randrange(9))) for _ in range(2))
        scores = iter([1 - sign, 1 + sign])
        pairs = align(a, b, lambda pairs, scores=scores: (next(scores),))
        assert [i for i, _ in pairs if i is not None] == list(range(len(a)))
        assert [j for _, j in pairs if j is not None] == list(range(len(b)))
        both = [(i, j) for i, j in pairs if i is not None and j is not None]
        assert all(a[i] == b[j] for i, j in both)
        assert len(both) == longest(a, b), (a, b, pairs)


def test_the_score_chooses_between_the_earliest_and_the_latest() -> None:
    def begin(pairs: list[Any]) -> tuple[float, ...]:
        return (-next(k for k, pair in enumerate(pairs) if None in pair),)

    assert align("aaa", "aaaa", begin)[0] == (None, 0)
    assert align("aaa", "aaaa", lambda pairs: (0,))[-1] == (None, 3)


def test_too_many_edits_are_one_block() -> None:
    a, b = "x" + "a" * LARGEST + "y", "x" + "b" * LARGEST + "y"
    pairs = align(a, b, lambda pairs: (0,))
    assert (pairs[0], pairs[-1]) == ((0, 0), (LARGEST + 1, LARGEST + 1))
    assert pairs[1 : LARGEST + 1] == [(k, None) for k in range(1, LARGEST + 1)]
    assert len(pairs) == 2 * LARGEST + 2


def test_purity_counts_places_that_go_together() -> None:
    assert purity([("a:1", "b:1"), ("a:1", "b:1"), ("a:1", "b:2"), ("a:3", "b:4")]) == 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn"])
def test_ulps_count_the_values_between(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    width = kind.itemsize
    bits = np.arange(0, 100, dtype=f"u{width}")  # from zero up, neighbours
    up = bits.view(kind)
    for shift in (1, 2, 7):
        found = difference([up[:-shift]], [up[shift:]])
        assert (found.differing, found.max_ulp, found.median_ulp) == (100 - shift, shift, shift)
        found = difference([-up[:-shift]], [-up[shift:]])
        assert (found.max_ulp, found.median_ulp) == (shift, shift)
    across = difference([up[1:2]], [-up[1:2]])
    assert across.max_ulp == 2
    zeros = difference([up[:1]], [-up[:1]])
    assert (zeros.differing, zeros.max_ulp, zeros.relative_norm) == (1, None, 0.0)


def test_nan_and_other_dtypes() -> None:
    x = np.array([1.0, np.nan, 3.0], np.float32)
    y = np.array([1.0, 2.0, np.nan], np.float32)
    found = difference([x], [y])
    assert (found.differing, found.max_ulp, found.relative_norm) == (2, None, 0.0)
    assert difference([x], [np.copysign(x, -1) * np.float32(-1)]).differing == 0  # another NaN
    found = difference([np.array([3, 4])], [np.array([3, 8])])
    assert (found.differing, found.max_ulp, found.relative_norm) == (1, None, 0.8)
    z = np.array([3 + 4j, 1j], np.complex64)
    found = difference([z, np.ones(1)], [z + np.complex64(2**-21), np.ones(1)])
    assert (found.elements, found.differing) == (3, 2)
    assert found.relative_norm > 0
    flags = difference([np.array([True, False])], [np.array([True, True])])
    assert (flags.differing, flags.max_ulp) == (1, None)


def record(folder: Path, calls: dict[int, list[tuple[str, int]]]) -> Path:
    """A record of barriers: for each rank the groups and numbers that it calls."""
    path = folder / "calls.jsonl"
    groups = {"0": [0, 1, 2], "1": [0, 1], "2": [1, 2]}
    lines: list[dict[str, Any]] = [{"kind": "launch", "format": 1, "ranks": 3}]
    lines += [{"kind": "group", "group": name, "ranks": ranks} for name, ranks in groups.items()]
    for rank, made in calls.items():
        for sequence, (group, number) in enumerate(made):
            place = {"rank": rank, "sequence": sequence, "group": group, "number": number}
            about = {"operation": "barrier", "site": "x:1", "dtypes": [], "shapes": []}
            lines.append({"kind": "call", **place, **about})
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("written", "read_back"),
    [
        ({"order": "ring", "accumulate": "bfloat16", "seed": 3}, "ring accumulate=bfloat16 seed=3"),
        (
            {"order": "ring", "wire": "Wire('int8', scale='amax')"},
            "ring, Wire('int8', scale='amax')",
        ),
        ("ring wire=int8:amax", "ring wire=int8:amax"),
        (None, None),
    ],
)
def test_reductions_of_records_are_texts(written: Any, read_back: Any, tmp_path: Path) -> None:
    """Format 1 has a mapping of fields, whose values may be calls."""
    path = record(tmp_path, {0: [("0", 0)]})
    first, *others, call = map(json.loads, path.read_text().splitlines())
    first["format"] = 3 if isinstance(written, str) else 1
    call |= {} if written is None else {"reduction": written}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [first, *others, call]))
    (event,) = read(path).events
    assert event.first.reduction == read_back


def test_events_are_in_an_order_that_every_rank_has(tmp_path: Path) -> None:
    calls = {
        2: [("2", 0), ("0", 0), ("2", 1)],
        0: [("1", 0), ("0", 0), ("1", 1)],
        1: [("1", 0), ("2", 0), ("0", 0), ("2", 1), ("1", 1)],
    }
    run = read(record(tmp_path, calls))
    names = [(event.first.group, event.first.number) for event in run.events]
    assert len(names) == 5
    for made in calls.values():
        assert [name for name in names if name in made] == made
    assert [event.index for event in run.events] == list(range(5))


def test_calls_that_ranks_post_in_different_orders(tmp_path: Path) -> None:
    """Asynchronous calls on two groups: no order is that of both ranks."""
    calls = {
        0: [("0", 0), ("1", 0), ("0", 1)],
        1: [("1", 0), ("0", 0), ("0", 1)],
        2: [("0", 0), ("0", 1)],
    }
    run = read(record(tmp_path, calls))
    names = [(event.first.group, event.first.number) for event in run.events]
    assert sorted(names) == [("0", 0), ("0", 1), ("1", 0)]
    assert names[-1] == ("0", 1)
    assert all(event.complete for event in run.events)
