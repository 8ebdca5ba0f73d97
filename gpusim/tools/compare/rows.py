"""The rows of a comparison: for each pair of calls, whether its data differ, how, and how much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from .difference import Difference, difference
from .folds import REDUCING
from .pairing import REPLICATED, Pairs, describe
from .ratios import COARSE, condition, factor_of, rounding_threshold
from .runs import Event, Run, dtype_of

__all__ = ["ROW_CLASSES", "Row", "classes_of", "difference_of", "row_of"]

ROW_CLASSES = (
    "equal",
    "rounding",
    "untold",
    "factor",
    "larger",
    "carried",
    "differs",
    "only",
    "other",
    "unknown",
)


@dataclass(frozen=True)
class Row:
    """An aligned pair of events: positions in both runs, and what differs.

    **Attributes**:

    - `operands`, `results`: the numbers of ranks in which they differ, None where that is not
      known.
    - `difference`: that of the results, where they differ and arrays were kept.
    - `kind`: "equal"; "rounding" (results differ by no more than rounding may); "untold"
      (by no more than rounding may, which is so much here that it tells nothing); "factor" (those
      of b are a's times `factor`); "larger" (results differ by more, and operands are equal or not
      known); "carried" (operands differ already); "only" (one run lacks the call); "other" (the
      calls are not the same); "differs" (results do, and whole arrays were not kept); "unknown"
      (neither operands nor results are compared).
    - `factor`: of "factor", its value and how it is written.
    """

    a: int | None
    b: int | None
    operation: str
    place_a: str
    place_b: str
    operands: int | None
    results: int | None
    difference: Difference | None
    kind: str = "equal"
    factor: tuple[float, str] | None = None


def row_of(pairs: Pairs, at: int) -> Row:
    """The row of a pair."""
    i, j = pairs.pairs[at]
    one, other = pairs.events(at)
    known = one or other
    assert known is not None
    operands, results = pairs.unequal(at)
    found = None
    if results and one is not None and other is not None:
        found = difference_of(pairs, one, other, "results", results)
    kind, factor = _kind(pairs, at, operands, results, found)
    return Row(
        i,
        j,
        describe(known.first),
        "" if one is None else one.first.site,
        "" if other is None else other.first.site,
        None if operands is None else len(operands),
        None if results is None else len(results),
        found,
        kind,
        factor,
    )


def classes_of(rows: Sequence[Row]) -> dict[str, int]:
    """How many rows are of each class, without those of none."""
    found = Counter(row.kind for row in rows)
    return {name: found[name] for name in ROW_CLASSES if found[name]}


def difference_of(
    pairs: Pairs, one: Event, other: Event, name: str, ranks: Sequence[int]
) -> Difference | None:
    """The difference of operands or results, of all ranks or of one if all have the same."""
    sides = _sides(pairs, one, other, name, ranks)
    if sides is None:
        return None
    kinds = [[(x.dtype, x.shape) for x in side] for side in sides]
    return difference(*sides) if kinds[0] == kinds[1] else None


def _sides(
    pairs: Pairs, one: Event, other: Event, name: str, ranks: Sequence[int]
) -> tuple[list[Any], list[Any]] | None:
    """The tensors of both runs; None without whole arrays."""
    if name == "results" and one.first.operation in REPLICATED:
        ranks = ranks[:1]
    sides: tuple[list[Any], list[Any]] = ([], [])
    for rank in ranks:
        for side, run, event in zip(sides, (pairs.a, pairs.b), (one, other), strict=True):
            call = event.calls.get(rank, event.first)
            arrays = run.arrays(getattr(call, name))
            if arrays is None:
                return None
            side += arrays
    return sides


def _kind(
    pairs: Pairs,
    at: int,
    operands: list[int] | None,
    results: list[int] | None,
    found: Difference | None,
) -> tuple[str, tuple[float, str] | None]:
    one, other = pairs.events(at)
    if one is None or other is None:
        return "only", None
    if not pairs.alike(at):
        return "other", None
    if operands is None and results is None:
        return "unknown", None
    if not operands and not results:
        return "equal", None
    if found is None or not results:
        return ("carried" if operands else "differs"), None
    small = not found.not_finite and found.relative_norm < np.inf
    if small and found.relative_norm <= _threshold(pairs, one, other, found.relative_norm):
        return ("rounding" if found.relative_norm <= COARSE else "untold"), None
    sides = _sides(pairs, one, other, "results", results)
    ranks = Fraction(pairs.b.ranks, pairs.a.ranks)
    factor = None if sides is None else factor_of(*sides, [ranks, 1 / ranks])
    if factor is not None:
        return "factor", (factor.value, factor.name)
    return ("carried" if operands else "larger"), None


def _threshold(pairs: Pairs, one: Event, other: Event, norm: float) -> float:
    """The threshold of rounding, with the operands' condition where it decides."""
    dtype = _dtype(pairs.a, one)
    terms = [len(event.ranks) for event in (one, other)]
    reductions = [event.first.reduction for event in (one, other)]
    if one.first.operation not in REDUCING:
        terms = [1, 1]
    usual = rounding_threshold(dtype, terms, None, reductions)
    if norm <= usual or one.first.operation != "all_reduce" or norm > 0.1:
        return usual
    operands = [pairs.a.arrays(call.operands) for call in one.calls.values()]
    total = pairs.a.arrays(one.first.results)
    if total is None or any(each is None for each in operands):
        return usual
    known = condition([each for each in operands if each is not None], total)
    return max(usual, rounding_threshold(dtype, terms, known, reductions))


def _dtype(run: Run, event: Event) -> np.dtype[Any]:
    results = event.first.results or ()
    return dtype_of(results[0][0]) if results else np.dtype(np.float32)
