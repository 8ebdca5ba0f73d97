"""Two runs compared: where they begin to differ, the cause's class, and all calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from .cause_words import words_of
from .causes import Cause, Found, cause_of
from .chains import Interval, interval_of, size_of
from .difference import Difference
from .folds import REDUCING, folds_of
from .pairing import Pairs, pair_runs, terms_that_differ
from .rows import Row, classes_of, difference_of, row_of
from .runs import Call, Run

__all__ = ["Comparison", "Verdict", "compare"]

LARGER = ("larger", "other", "only")
"""Classes of rows that differ by more than rounding and not by a factor, of their own."""


@dataclass(frozen=True)
class Verdict:
    """The first place where two runs differ, and what lies behind it.

    **Attributes**:

    - `kind`: "collective" (operands are equal and results differ), "operands" (they differ),
      "results" (operands are not compared), "missing" or "additional" (a call of a, or of b, that
      the other run lacks), "other" (another call), or "end" (a run ends).
    - `interval`: where the cause lies.
    - `cause`: its class.
    - `a`, `b`: the call in each run; "missing" has no b, "additional" no a.
    - `previous_a`, `previous_b`: for "missing", "additional" and "end", the calls before.
    - `ranks`: those whose operands or results differ.
    - `differs`: for "other": "operation", "op", "dtypes", "shapes", "splits", "root",
      "buckets", "group", "peer", "tag".
    - `difference`: of operands or results, if arrays were kept.
    - `folds`: for "collective", the known folds that give each side's result, by run.
    - `reductions`: for "collective", the Reduction that each run recorded.
    """

    kind: str
    interval: Interval
    cause: Cause
    a: Call | None = None
    b: Call | None = None
    previous_a: Call | None = None
    previous_b: Call | None = None
    ranks: tuple[int, ...] = ()
    differs: tuple[str, ...] = ()
    difference: Difference | None = None
    folds: Mapping[str, list[str] | None] = field(default_factory=dict)
    reductions: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    def record(self) -> dict[str, Any]:
        """The verdict as JSON has it, without the words of its cause."""
        found: dict[str, Any] = _plain(asdict(self))
        return {**found, "interval": self.interval.record(), "cause": _plain(self.cause.record())}


@dataclass(frozen=True)
class Comparison:
    """Two runs, the first difference (None if they are equal), and all aligned events."""

    a: Run
    b: Run
    verdict: Verdict | None
    rows: list[Row]

    @property
    def first_larger(self) -> int | None:
        """The first row whose results differ by more than rounding, and not by a factor."""
        found = (k for k, row in enumerate(self.rows) if row.kind in LARGER)
        return next(found, None)

    def record(self) -> dict[str, Any]:
        """The comparison as JSON has it."""
        runs = {name: run.record() for name, run in (("a", self.a), ("b", self.b))}
        rows = []
        for row in self.rows:
            made: dict[str, Any] = _plain(asdict(row))
            made["class"] = made.pop("kind")
            if row.factor is not None:
                made["factor"], made["factor_name"] = row.factor
            rows.append(made)
        verdict = None if self.verdict is None else self.verdict.record()
        if self.verdict is not None and verdict is not None:
            words = words_of(self.verdict.cause, (self.a.ranks, self.b.ranks))
            verdict["cause"]["words"] = " ".join(words)
        found: dict[str, Any] = {
            "format": 2,
            "equal": self.verdict is None,
            "runs": runs,
            "verdict": verdict,
            "classes": classes_of(self.rows),
        }
        if self.first_larger is not None:
            found["first_larger"] = self.first_larger
        return {**found, "rows": rows}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if each not in (None, (), {})}
    if isinstance(value, float) and not np.isfinite(value):
        return repr(value)
    return value


def compare(a: Run, b: Run, *, folds: bool = True) -> Comparison:
    """Compare two runs. `folds`: whether to find the folds behind a collective's results.

    **Raises**: ValueError if nothing of the runs can be compared.
    """
    pairs = pair_runs(a, b)
    compared = any(
        None not in pair and pairs.unequal(at)[1] is not None for at, pair in enumerate(pairs.pairs)
    )
    if not compared and pairs.pairs and all(None not in pair for pair in pairs.pairs):
        raise ValueError(
            f"{a.path} and {b.path} have no results that can be compared; records in folders have "
            "digests (--record FOLDER)"
        )
    rows = [row_of(pairs, at) for at in range(len(pairs.pairs))]
    verdict = _verdict(pairs, folds) if pairs.same else _across(pairs, rows)
    return Comparison(pairs.a, pairs.b, verdict, rows)


def _verdict(pairs: Pairs, folds: bool) -> Verdict | None:
    for at in range(len(pairs.pairs)):
        one, other = pairs.events(at)
        if one is None or other is None:
            return _structural(pairs, at)
        if not pairs.alike(at):
            return _made(pairs, at, "other", differs=terms_that_differ(one, other))
        operands, results = pairs.unequal(at)
        if operands:
            return _made(pairs, at, "operands", tuple(operands))
        if not results:
            continue
        if one.first.operation == "recv":
            return _received(pairs, at, tuple(results))
        if not pairs.same or operands is None:
            return _made(pairs, at, "results", tuple(results))
        return _collective(pairs, at, tuple(results), folds)
    return None


def _across(pairs: Pairs, rows: Sequence[Row]) -> Verdict | None:
    """The verdict on runs of different numbers of ranks: on the first call that differs by more
    than rounding or a factor, which their sums have by design, else on the first where that cannot
    be told, or else on the first that differs.
    """
    differing = [k for k, row in enumerate(rows) if row.kind not in ("equal", "unknown")]
    larger = [k for k in differing if rows[k].kind in LARGER]
    untold = [k for k in differing if rows[k].kind == "untold"]
    for at in (larger or untold or differing)[:1]:
        one, other = pairs.events(at)
        if one is None or other is None:
            return _structural(pairs, at)
        if not pairs.alike(at):
            return _made(pairs, at, "other", differs=terms_that_differ(one, other))
        found = _made(pairs, at, "results", tuple(pairs.unequal(at)[1] or ()))
        before = [rows[k] for k in differing if k < at and rows[k].place_a == rows[at].place_a]
        if rows[at].kind == "larger" and before:
            about = {"across": True, **found.cause.about}
            return replace(found, cause=Cause("optimizer", "consistent", ("other",), about=about))
        return found
    return None


def _made(
    pairs: Pairs,
    at: int,
    kind: str,
    ranks: tuple[int, ...] = (),
    differs: tuple[str, ...] = (),
    folds: Mapping[str, list[str] | None] | None = None,
    **more: Any,
) -> Verdict:
    """A verdict on a pair, with its interval and cause."""
    one, other = pairs.events(at)
    shown = min(ranks) if ranks else (one or other).first.rank  # type: ignore[union-attr]
    interval = interval_of(pairs, at, shown, kind)
    known = folds or {}
    difference = None
    if ranks and one is not None and other is not None:
        name = "operands" if kind == "operands" else "results"
        difference = difference_of(pairs, one, other, name, ranks)
    return Verdict(
        kind,
        interval,
        cause_of(Found(pairs, at, kind, ranks, differs, interval, known)),
        None if one is None else one.calls.get(shown, one.first),
        None if other is None else other.calls.get(shown, other.first),
        ranks=ranks,
        differs=differs,
        difference=difference,
        folds=known,
        error=(pairs.a.error or pairs.b.error) if kind == "other" else None,
        **more,
    )


def _collective(pairs: Pairs, at: int, ranks: tuple[int, ...], folds: bool) -> Verdict:
    """Operands are equal, and results differ."""
    one, other = pairs.events(at)
    assert one is not None
    assert other is not None
    if one.first.operation not in REDUCING:
        return _made(pairs, at, "collective", ranks)
    sides = (("a", pairs.a, one), ("b", pairs.b, other))
    known = {name: folds_of(run, event) for name, run, event in sides} if folds else {}
    reductions = {name: event.first.reduction for name, _, event in sides}
    return _made(pairs, at, "collective", ranks, folds=known, reductions=reductions)


def _received(pairs: Pairs, at: int, ranks: tuple[int, ...]) -> Verdict:
    """A message brings other values: the verdict is on the call that sends them, if it differs.

    Events are in an order that each rank's calls have; a message's ends may stand in any order.
    """
    one, _ = pairs.events(at)
    assert one is not None
    for later in range(at + 1, len(pairs.pairs)):
        sent, _ = pairs.events(later)
        if sent is None or sent.first.operation != "send" or not pairs.alike(later):
            continue
        if sent.first.peer == one.first.rank and one.first.peer in (None, sent.first.rank):
            operands, _ = pairs.unequal(later)
            if operands:
                return _made(pairs, later, "operands", tuple(operands))
    return _made(pairs, at, "results", ranks)


def _structural(pairs: Pairs, at: int) -> Verdict:
    """A verdict on a block of events that one of the runs lacks."""
    a, b, rest = pairs.a, pairs.b, pairs.pairs[at:]
    block = next((k for k, pair in enumerate(rest) if None not in pair), len(rest))
    removed = [i for i, _ in rest[:block] if i is not None]
    inserted = [j for _, j in rest[:block] if j is not None]
    error = (a.error if inserted else b.error) or a.error or b.error
    if removed and inserted:
        return _other_calls(pairs, at, removed, inserted, error)
    kind = "missing" if removed else "additional"
    if block == len(rest):
        kind = "end"
    previous = pairs.events(at - 1) if at else (None, None)
    found = _made(pairs, at, kind)
    return replace(
        found,
        previous_a=None if previous[0] is None else previous[0].first,
        previous_b=None if previous[1] is None else previous[1].first,
        error=error,
    )


def _other_calls(
    pairs: Pairs, at: int, removed: Sequence[int], inserted: Sequence[int], error: str | None
) -> Verdict:
    """A verdict on calls of a where b makes others."""
    one, other = pairs.a.events[removed[0]], pairs.b.events[inserted[0]]
    differs = terms_that_differ(one, other)
    if "operation" not in differs and "op" not in differs:
        sizes = [
            sum(size_of(run.events[k].first) for k in block)
            for run, block in ((pairs.a, removed), (pairs.b, inserted))
        ]
        differs = ("buckets",) if sizes[0] == sizes[1] else differs
    joined = [*pairs.pairs[:at], (removed[0], inserted[0])]
    found = _made(Pairs(pairs.a, pairs.b, joined, pairs.same), at, "other", differs=differs)
    return replace(found, error=error)
