"""Classes of causes: each from records in which it is planted, with the figures that it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpusim.recording import RecordedGroup, Recorder
from gpusim.tools.compare.buckets import cut_of
from gpusim.tools.compare.cause_words import words_of
from gpusim.tools.compare.comparing import Comparison, compare
from gpusim.tools.compare.ratios import cast_of, condition, factor_of, rounding_threshold
from gpusim.tools.compare.runs import Run, read
from gpusim.tools.compare.words import sentences

RANKS = 4
Parts = list[Any]
"""The operand of each rank."""


@dataclass
class Sum:
    """A call: its line, and each rank's operand; the result, or the sum of the operands."""

    site: str
    parts: Parts
    total: Any = None
    op: str = "SUM"


def written(folder: Path, calls: Sequence[Sum], arrays: bool = True) -> Run:
    """The record of these calls."""
    recorder = Recorder(folder, digests=True, arrays=range(99) if arrays else None)
    ranks = len(calls[0].parts)
    recorder.begin(ranks)
    world = RecordedGroup("0", "0", "", tuple(range(ranks)))
    for number, call in enumerate(calls):
        kind = (call.parts[0].dtype.name, call.parts[0].shape)
        made = []
        for rank, x in enumerate(call.parts):
            tensors, values = [(*kind, x.nbytes)], [(*kind, x)]
            made.append((rank, recorder.add(
                world, rank, number, "all_reduce", tensors, call.site, values, op=call.op,
            )))  # fmt: skip
        total = np.asarray(sum(call.parts[1:], call.parts[0])) if call.total is None else call.total
        recorder.add_results(made, [(*kind, np.asarray(total, call.parts[0].dtype))])
    recorder.end()
    return read(folder)


def compared(tmp_path: Path, a: Sequence[Sum], b: Sequence[Sum], arrays: bool = True) -> Comparison:
    return compare(*(written(tmp_path / n, side, arrays) for n, side in (("a", a), ("b", b))))


def drawn(seed: int = 0, size: int = 50, ranks: int = RANKS) -> Parts:
    draws = np.random.default_rng(seed)
    return [draws.standard_normal(size).astype(np.float32) for _ in range(ranks)]


def one_changed(parts: Parts, rank: int, new: Any) -> Parts:
    return [new if r == rank else x for r, x in enumerate(parts)]


X, Y = drawn(0), drawn(1)
NEAR = [x + np.float32(0.01) * y for x, y in zip(X, Y, strict=True)]
TIMES = [np.float32(n) for n in (0.5, 3, 0.25, 7)]
OTHERS = one_changed(X, 2, Y[2])
STEP = Sum("p.py:1", Y)
CASES: list[tuple[str, list[Sum], list[Sum], str, str, dict[str, Any]]] = [
    ("halved", [Sum("p.py:2", X)], [Sum("p.py:2", [x / 2 for x in X])], "factor", "proven",
     {"factor_name": "1/2", "factor": 0.5}),
    ("times 3", [Sum("p.py:2", X)], [Sum("p.py:2", [x * 3 for x in X])], "factor", "consistent",
     {"factor_name": "3"}),
    ("each its own", [Sum("p.py:2", X)],
     [Sum("p.py:2", [x * t for x, t in zip(X, TIMES, strict=True)])], "factor", "consistent",
     {"factors": {r: float(t) for r, t in enumerate(TIMES)}}),
    ("one rank's doubled", [Sum("p.py:2", X)], [Sum("p.py:2", one_changed(X, 1, X[1] * 2))],
     "scaled", "proven", {"factor_name": "2", "ranks": [1]}),
    ("one rank's data", [Sum("p.py:2", X)], [Sum("p.py:2", OTHERS)], "data", "consistent",
     {"ranks": [2]}),
    ("all ranks' data", [Sum("p.py:2", X)], [Sum("p.py:2", Y)], "data", "consistent",
     {"ranks": [0, 1, 2, 3]}),
    ("exchanged", [Sum("p.py:2", X)], [Sum("p.py:2", [X[1], X[0], X[2], X[3]])], "permuted",
     "proven", {"sources": {0: 1, 1: 0}, "ranks": [0, 1]}),
    ("dealt otherwise", [Sum("p.py:2", X, np.ones(50))],
     [Sum("p.py:2", Y, np.ones(50, np.float32) + np.float32(2**-23))], "permuted", "consistent",
     {}),
    ("counts exchanged", [Sum("p.py:2", [np.float32([n]) for n in (4, 8, 6, 2)])],
     [Sum("p.py:2", [np.float32([n]) for n in (8, 4, 6, 2)])], "data", "consistent", {}),
    ("an update", [Sum("p.py:2", X), STEP, Sum("p.py:2", X), STEP],
     [Sum("p.py:2", X), STEP, Sum("p.py:2", NEAR), STEP], "optimizer", "consistent",
     {"ranks": [0, 1, 2, 3]}),
    ("a cast and back", [Sum("p.py:2", X)],
     [Sum("p.py:2", [x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in X])], "cast",
     "proven", {"dtype": "bfloat16", "of": "b"}),
    ("a cast", [Sum("p.py:2", X)], [Sum("p.py:2", [x.astype(np.float16) for x in X])], "cast",
     "proven", {"dtype": "float16", "dtypes": {"a": "float32", "b": "float16"}}),
    ("last bits", [Sum("p.py:2", X)], [Sum("p.py:2", [x * np.float32(1 + 2**-23) for x in X])],
     "rounding", "consistent", {"where": "program"}),
    ("a fold", [Sum("p.py:2", X)], [Sum("p.py:2", X, X[3] + X[2] + X[1] + X[0])], "rounding",
     "proven", {"where": "collective"}),
    ("no fold, far", [Sum("p.py:2", X)], [Sum("p.py:2", X, X[0])], "other", "consistent", {}),
    ("a mean", [Sum("p.py:2", X)], [Sum("p.py:2", X, sum(X) / np.float32(4), "AVG")], "factor",
     "proven", {"factor_name": "1/4", "operators": True}),
    ("cut", [Sum("p.py:2", X)], [Sum("p.py:2", [x[:20] for x in X]),
     Sum("p.py:2", [x[20:] for x in X])], "buckets", "proven",
     {"sizes": {"a": [50], "b": [20, 30]}}),
    ("cut, in another order", [Sum("p.py:2", X)], [Sum("p.py:2", [x[20:] for x in X]),
     Sum("p.py:2", [x[:20] for x in X])], "buckets", "proven",
     {"sizes": {"a": [50], "b": [30, 20]}}),
    ("cut, other elements", [Sum("p.py:2", X)], [Sum("p.py:2", [y[:20] for y in Y]),
     Sum("p.py:2", [y[20:] for y in Y])], "buckets", "consistent", {}),
    ("missing", [STEP, Sum("p.py:2", X), Sum("p.py:3", [x[:3] for x in X])],
     [STEP, Sum("p.py:3", [x[:3] for x in X])], "missing", "proven", {}),
    ("doubled", [Sum("p.py:2", X)], [Sum("p.py:2", X), Sum("p.py:2", [sum(X)] * 4)], "ended",
     "proven", {}),
    ("doubled, not last", [Sum("p.py:2", X), Sum("p.py:3", [x[:3] for x in X])],
     [Sum("p.py:2", X), Sum("p.py:2", [sum(X[1:], X[0])] * 4), Sum("p.py:3", [x[:3] for x in X])],
     "doubled", "proven", {}),
    ("another order", [Sum("p.py:2", X), Sum("p.py:3", [x[:3] for x in X])],
     [Sum("p.py:3", [x[:3] for x in X]), Sum("p.py:2", X)], "other", "consistent",
     {"order": True}),
    ("a NaN", [Sum("p.py:2", X)], [Sum("p.py:2", one_changed(X, 2, X[2] * np.float32([np.nan] +
     [1] * 49)))], "data", "consistent", {"ranks": [2], "not_finite": {"a": 0, "b": 1}}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b", "name", "certainty", "about"), [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)  # fmt: skip
def test_a_class_is_what_the_data_show(
    a: list[Sum], b: list[Sum], name: str, certainty: str, about: dict[str, Any], tmp_path: Path
) -> None:
    found = compared(tmp_path, a, b)
    assert found.verdict is not None
    cause = found.verdict.cause
    assert (cause.name, cause.certainty) == (name, certainty), sentences(found)
    assert {key: cause.about.get(key) for key in about} == about
    words = words_of(cause, (RANKS, RANKS))
    told = sentences(found)
    assert all(word in told for word in words)
    assert ("Proven" in " ".join(words)) == (
        certainty == "proven" and name not in ("missing", "ended", "buckets")
    )
    record = found.record()
    assert record["verdict"]["cause"]["class"] == name
    assert record["verdict"]["cause"]["words"] == " ".join(words)
    if cause.certainty == "proven":
        assert not cause.alternatives


@pytest.mark.parametrize("name", ["halved", "one rank's data", "an update", "a cast", "last bits"])
def test_digests_alone_claim_less(name: str, tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case[0] == name]
    found = compared(tmp_path, case[1], case[2], arrays=False)
    assert found.verdict is not None
    cause = found.verdict.cause
    assert (cause.certainty, cause.needs) == ("consistent", ("arrays",))
    assert case[3] in (cause.name, *cause.alternatives) or case[3] == "rounding"
    assert any("--arrays all" in each for each in sentences(found))


def test_scalars_need_no_arrays(tmp_path: Path) -> None:
    """A tensor of four bytes is in its digest: a logged sum over more ranks is twice as large."""
    two, four = (written(tmp_path / str(n), [Sum("p.py:9", [np.float32(0.3)] * n)], False)
                 for n in (2, 4))  # fmt: skip
    found = compare(two, four)
    assert [(row.kind, row.factor) for row in found.rows] == [("factor", (2.0, "2"))]
    assert "as a sum over the ranks has by design" in sentences(found)[1]
    assert found.first_larger is None


def test_numbers_of_ranks_tell_last_bits_from_more(tmp_path: Path) -> None:
    total, small = sum(X[1:], X[0]), np.float32(1 + 2**-23)
    a = [Sum("p.py:2", X, total), Sum("p.py:3", X, total), Sum("p.py:4", X, total)]
    b = [Sum("p.py:2", X[:2], total * small), Sum("p.py:3", X[:2], total * 2),
         Sum("p.py:4", X[:2], Y[0])]  # fmt: skip
    found = compared(tmp_path, a, b)
    assert [row.kind for row in found.rows] == ["rounding", "factor", "larger"]
    assert found.verdict is not None
    assert found.verdict.a is not None
    assert (found.verdict.a.site, found.first_larger) == ("p.py:4", 2)
    assert found.record()["classes"] == {"rounding": 1, "factor": 1, "larger": 1}


def test_the_threshold_is_that_of_sums_in_any_order() -> None:
    """Sums in two orders stay below it; one that is changed by 2**-10 of its norm does not."""
    draws = np.random.default_rng(3)
    for n in (2, 8, 64):
        x = draws.standard_normal((n, 300)).astype(np.float32)
        one, other = np.zeros(300, np.float32), np.zeros(300, np.float32)
        for row, back in zip(x, x[::-1], strict=True):
            one, other = one + row, other + back
        bound = rounding_threshold(one.dtype, [n, n], condition([[row] for row in x], [one]))
        norm = float(np.linalg.norm(one - other) / np.linalg.norm(one))
        assert 0 <= norm <= bound < 2**-10
    usual = rounding_threshold(one.dtype, [4, 4], 1.0)
    assert rounding_threshold(one.dtype, [4, 4], 1.0, ["ring accumulate=bfloat16"]) > 1000 * usual


def test_factors_of_few_elements_are_those_that_are_likely() -> None:
    x = np.float32([2.0, 0, 0])
    assert factor_of([x], [x * 5]) is None
    assert factor_of([x], [x]) is None
    assert factor_of([np.zeros(9, np.float32)], [np.ones(9, np.float32)]) is None
    assert factor_of([np.arange(9)], [np.arange(9) * 2]) is None  # integers do not round
    assert cast_of([x], [x]) is not None  # every float16 is its own cast
    assert cast_of([np.arange(4)], [np.arange(4)]) is None


def test_a_cut_needs_as_many_elements(tmp_path: Path) -> None:
    a = written(tmp_path / "a", [Sum("p.py:2", X)])
    b = written(tmp_path / "b", [Sum("p.py:2", [x[:20] for x in X])])
    assert cut_of(a, 0, b, 0) is None
    assert cut_of(a, 0, a, 0) is None


@pytest.mark.parametrize(
    ("places", "at", "expected"),
    [
        ("gl gl", 2, 0),
        ("gl gl gl", 4, 2),
        ("ppl ppl", 4, 0),  # two calls of one line a turn: at least a turn before
        ("ppl ppl ppl", 7, 3),
        ("ppl ppl", 1, None),  # the call before is of the same turn
        ("pgp pgp", 2, None),  # also where another stands between
        ("ssse ssse", 6, 0),
        ("ssse ssse", 2, None),
        ("gg", 1, 0),
        ("gabl gl gl", 4, 0),
    ],
)
def test_a_turn_holds_all_that_a_program_comes_back_to(
    places: str, at: int, expected: int | None, tmp_path: Path
) -> None:
    """The bound of the call at a position of a program that calls these places."""
    sites = places.replace(" ", "")
    calls = [Sum(f"p.py:{ord(site)}", X) for site in sites]
    changed = [Sum(f"p.py:{ord(site)}", NEAR if k == at else X) for k, site in enumerate(sites)]
    found = compared(tmp_path, calls, changed)
    assert found.verdict is not None
    interval = found.verdict.interval
    assert interval.until["a"].sequence == at
    after = interval.after.get("a")
    assert (None if after is None else after.sequence) == expected


def test_what_others_write_is_escaped(tmp_path: Path) -> None:
    from gpusim.tools.compare import report

    site = "<script>alert(1)</script>.py:2"
    a = written(tmp_path / "a<b>", [Sum(site, X)])
    b = written(tmp_path / "b", [Sum(site, Y)])
    page = report.write(compare(a, b), tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert "a<b>" not in page
    assert "&lt;script&gt;" in page
