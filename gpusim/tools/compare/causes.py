"""Classes of causes: by what relation the data of two runs have where they begin to differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from .buckets import cut_after, cut_of, is_table_of_buckets
from .chains import Interval, previous_of, size_of
from .difference import difference
from .folds import REDUCING
from .pairing import Pairs
from .ratios import (
    COARSE,
    Factor,
    cast_of,
    coherence,
    condition,
    factor_of,
    rounding_threshold,
)
from .runs import Event, Run

__all__ = ["CLASSES", "Cause", "cause_of"]

CLASSES = (
    "rounding",
    "factor",
    "buckets",
    "data",
    "permuted",
    "optimizer",
    "cast",
    "missing",
    "doubled",
    "additional",
    "scaled",
    "ended",
    "other",
)
PROVEN, CONSISTENT = "proven", "consistent"
ALIKE = 0.5
"""A relative norm above which a difference is that of other data and not of a changed update.

Gradients of independent data differ by about the square root of two of their norm where noise
prevails; a step of an update changes them by less, or training would not go on."""

TELLING = 8
"""Different values from which on an exact relation counts as proven."""
UNLIKE = 1.0
"""The same where the call was equal before: a learning rate of less than half gives 0.5."""

ROUNDED_BEFORE = (("float16", 2.0**-14, 2.0**-10.5), ("bfloat16", 2.0**-10.5, 2.0**-7))
"""Relative norms of what is computed from values rounded to a dtype: within a factor of four of its
unit roundoff, 2**-12 and 2**-9, as products and sums of some terms give."""

Arrays = list[list[Any]]
"""For each rank, the tensors that it passes."""


@dataclass(frozen=True)
class Cause:
    """A class of cause that the data allow.

    **Attributes**:

    - `name`: one of CLASSES.
    - `certainty`: "proven" (the data's relation is exact, as a fold that gives all bits), or
      "consistent" (data that another cause may have too).
    - `alternatives`: other classes that the data allow.
    - `needs`: ("arrays",) where whole arrays, which were not kept, would tell more.
    - `about`: what is known: "factor" and "factor_name", "factors" (by rank), "dtype" and "of" (of
      a cast), "sizes" and "ddp" (of buckets), "sources" (for each rank of b, the rank of a whose
      operands it has), "ranks", "threshold", "norm", "where" ("collective" or "program").
    """

    name: str
    certainty: str
    alternatives: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The cause as JSON has it, without its words."""
        found = {"class": self.name, "certainty": self.certainty, **self.about}
        found |= {"alternatives": list(self.alternatives)} if self.alternatives else {}
        return found | ({"needs": list(self.needs)} if self.needs else {})


@dataclass(frozen=True)
class Found:
    """The first pair that differs: its position, kind of verdict, ranks and interval."""

    pairs: Pairs
    at: int
    kind: str
    ranks: Sequence[int]
    differs: Sequence[str]
    interval: Interval
    folds: Mapping[str, list[str] | None]

    @property
    def events(self) -> tuple[Event, Event]:
        one, other = self.pairs.events(self.at)
        assert one is not None
        assert other is not None
        return one, other


def cause_of(found: Found) -> Cause:
    """The class of cause behind a verdict."""
    if found.kind in ("missing", "additional", "end"):
        return _of_calls(found)
    if found.kind == "other":
        return _of_terms(found)
    if found.kind == "collective":
        return _of_results(found)
    if found.kind == "results":
        return _across(found)
    return _of_operands(found)


# ---------------------------------------------------------------- calls


def _of_calls(found: Found) -> Cause:
    if found.kind == "end":
        return Cause("ended", PROVEN)
    one, other = found.pairs.events(found.at)
    event = one or other
    assert event is not None
    runs = found.pairs.a, found.pairs.b
    if len({sum(_same_call(each, event) for each in run.events) for run in runs}) == 1:
        return Cause("other", CONSISTENT, about={"order": True})
    if other is None:
        return Cause("missing", PROVEN)
    near = [other.index + step for step in (-1, 1)]
    events = found.pairs.b.events
    for k in near:
        if 0 <= k < len(events) and _same_call(events[k], other):
            again = (events[k].first.results, events[k].first.operands)
            sure = k < other.index and other.first.operands and other.first.operands in again
            return Cause("doubled", PROVEN if sure else CONSISTENT)
    return Cause("additional", PROVEN)


def _same_call(one: Event, other: Event) -> bool:
    keys = [(e.ranks, e.first.operation, e.first.op, e.first.kinds) for e in (one, other)]
    return keys[0] == keys[1]


def _of_terms(found: Found) -> Cause:
    one, other = found.events
    a, b = found.pairs.a, found.pairs.b
    cut = cut_of(a, one.index, b, other.index)
    if cut is not None and "op" not in found.differs:
        about = {"sizes": {"a": list(cut.a), "b": list(cut.b)}, "ddp": False}
        return Cause("buckets", PROVEN if cut.equal else CONSISTENT, about=about)
    if is_table_of_buckets(one) and is_table_of_buckets(other):
        buckets = _table(found)
        if buckets is not None:
            return buckets
    if tuple(found.differs) == ("op",) and {one.first.op, other.first.op} == {"SUM", "AVG"}:
        ranks = Fraction(len(one.ranks))
        value = 1 / ranks if one.first.op == "SUM" else ranks
        about = {"factor": float(value), "factor_name": str(value), "operators": True}
        return Cause("factor", PROVEN, about=about)
    if tuple(found.differs) == ("dtypes",):
        x, y = (_operands(run, event, one.ranks) for run, event in ((a, one), (b, other)))
        names = {"dtypes": {"a": _dtype(one), "b": _dtype(other)}}
        if x is None or y is None:
            return Cause("cast", CONSISTENT, needs=("arrays",), about=names)
        cast = cast_of(_flat(x), _flat(y))
        if cast is not None:
            return Cause("cast", PROVEN, about={"dtype": cast.dtype, "of": cast.of, **names})
        return Cause("cast", CONSISTENT, about=names)
    return Cause("other", CONSISTENT, about={"differs": list(found.differs)})


def _dtype(event: Event) -> str:
    return event.first.kinds[0][0] if event.first.kinds else ""


def _table(found: Found) -> Cause | None:
    """The cause if DDP's table of buckets differs."""
    cut = cut_after(found.pairs, found.at)
    if cut is None:
        return None
    about = {"sizes": {"a": list(cut.a), "b": list(cut.b)}, "ddp": True}
    return Cause("buckets", PROVEN if cut.equal else CONSISTENT, about=about)


# ---------------------------------------------------------------- results


def _of_results(found: Found) -> Cause:
    """Operands are equal and results differ."""
    one, other = found.events
    first = one.first
    if first.operation not in REDUCING or first.op not in ("SUM", "AVG", "PRODUCT"):
        return Cause("other", CONSISTENT)
    where = {"where": "collective"}
    folds = [found.folds.get(name) for name in "ab"]
    if all(folds):
        return Cause("rounding", PROVEN, about=where)
    a, b = (_results(run, e) for run, e in _sided(found))
    operands = _operands(found.pairs.a, one, one.ranks)
    if a is None or b is None:
        return Cause("rounding", CONSISTENT, ("other",), ("arrays",), where)
    norm = _norm(a, b)
    bound = _bound(one, other, a, operands)
    about = {"threshold": bound, "norm": norm, **where}
    if norm <= bound:
        return Cause("rounding", CONSISTENT, about=about)
    factor = factor_of(a, b, _likely(found))
    if factor is not None:
        return Cause("factor", _sure(factor), about={**_named(factor), **where})
    return Cause("other", CONSISTENT, ("rounding",), about=about)


def _across(found: Found) -> Cause:
    """Results of different numbers of ranks."""
    one, other = found.events
    a, b = (_results(run, e) for run, e in _sided(found))
    if a is None or b is None:
        return Cause("other", CONSISTENT, ("rounding", "factor"), ("arrays",))
    factor = factor_of(a, b, _likely(found))
    if factor is not None:
        return Cause("factor", _sure(factor), about=_named(factor))
    norm = _norm(a, b)
    operands = _operands(found.pairs.a, one, one.ranks)
    bound = _bound(one, other, a, operands)
    about: dict[str, Any] = {"threshold": bound, "norm": norm}
    if COARSE < norm <= bound:
        return Cause("other", CONSISTENT, ("rounding",), about={"coarse": True, **about})
    if norm <= bound:
        return Cause("rounding", CONSISTENT, about=about)
    return Cause("other", CONSISTENT, about=about)


# ---------------------------------------------------------------- operands


def _of_operands(found: Found) -> Cause:
    """Operands differ on some ranks: the cause is in the program."""
    one, other = found.events
    if is_table_of_buckets(one):
        buckets = _table(found)
        if buckets is not None:
            return buckets
    everyone = _is_everyone(found, one)
    moved = _moved(one, other)
    if moved is not None:
        known = {"sources": moved, "ranks": list(found.ranks)}
        if _telling(_operands(found.pairs.a, one, found.ranks), one):
            return Cause("permuted", PROVEN, about=known)
        return Cause(
            "data", CONSISTENT, ("permuted",), about={"few": True, "ranks": list(found.ranks)}
        )
    later = found.interval.kind == "turn" or _is_later(found)
    a, b = (_operands(run, e, found.ranks) for run, e in _sided(found))
    about: dict[str, Any] = {"ranks": list(found.ranks)}
    if everyone and not later:
        often = _how_often(found, about)
        if often is not None:
            return often
    if a is None or b is None or not _alike(a, b):
        return _by_ranks(everyone, later, about)
    return _by_values(found, a, b, everyone, later, about)


def _sided(found: Found) -> list[tuple[Run, Event]]:
    return list(zip((found.pairs.a, found.pairs.b), found.events, strict=True))


def _is_everyone(found: Found, event: Event) -> bool:
    """Whether operands differ on all ranks that pass some."""
    if event.first.number is None:  # a message is of one rank
        return found.pairs.a.ranks == 1
    passing = [rank for rank, call in event.calls.items() if call.operands]
    return len(found.ranks) == len(passing)


def _is_later(found: Found) -> bool:
    return previous_of(found.pairs, found.at, min(found.ranks)) is not None


def _moved(one: Event, other: Event) -> dict[int, int] | None:
    """For each rank of b that has another's operands, the rank of a that has them."""
    sides = [{r: tuple(c.operands or ()) for r, c in e.calls.items()} for e in (one, other)]
    if sorted(sides[0].values()) != sorted(sides[1].values()) or len(sides[0]) < 2:
        return None
    free = [rank for rank in sides[0] if sides[0][rank] != sides[1][rank]]
    found = {}
    for rank in [*free]:
        source = next((r for r in free if sides[0][r] == sides[1][rank]), None)
        if source is None:
            return None
        free.remove(source)
        found[rank] = source
    return found


def _how_often(found: Found, about: dict[str, Any]) -> Cause | None:
    """The cause if one run makes this call several times as often as the other.

    Both begin with other operands, as where gradients are reduced for each part of a batch.
    """
    a, b = (_count(run, event) for run, event in _sided(found))
    if not (found.pairs.a.ended and found.pairs.b.ended) or a == b or max(a, b) % min(a, b):
        return None
    about = {"calls": {"a": a, "b": b}, **about}
    return Cause("additional" if b > a else "missing", CONSISTENT, ("data", "other"), about=about)


def _count(run: Run, event: Event) -> int:
    """How often a run makes a call like this one, at its place."""
    first = event.first
    return sum(each.first.site == first.site and _same_call(each, event) for each in run.events)


def _by_ranks(everyone: bool, later: bool, about: dict[str, Any]) -> Cause:
    """The cause by digests alone: by which ranks differ, and when."""
    needs = ("arrays",)
    if not everyone:
        others = ("scaled", "cast", *(("optimizer",) if later else ()))
        return Cause("data", CONSISTENT, others, needs, about)
    if later:
        return Cause("optimizer", CONSISTENT, ("data", "permuted", "cast"), needs, about)
    return Cause("other", CONSISTENT, ("factor", "data", "permuted", "cast"), needs, about)


def _by_values(
    found: Found, a: Arrays, b: Arrays, everyone: bool, later: bool, about: dict[str, Any]
) -> Cause:
    """The cause by whole operands."""
    one, other = found.events
    cast = cast_of(_flat(a), _flat(b))
    if cast is not None:
        about |= {"dtype": cast.dtype, "of": cast.of}
        if _telling(a, one):
            return Cause("cast", PROVEN, about=about)
        return Cause("cast", CONSISTENT, ("data",), about=about)
    norm = about["norm"] = _norm(_flat(a), _flat(b))
    about |= _not_finite(_flat(a), _flat(b))
    scaled = _scaled(found, a, b, everyone, later, about)
    if scaled is not None:
        return scaled
    dtype = a[0][0].dtype
    threshold = rounding_threshold(dtype, [1, 1], 1.0)
    if norm <= threshold:
        about |= {"threshold": threshold, "where": "program"}
        if later and everyone:
            return Cause("optimizer", CONSISTENT, ("rounding",), about=about)
        return Cause("rounding", CONSISTENT, ("optimizer",) if later else (), about=about)
    if everyone and len(a) > 1 and _same_total(found, one, other, norm):
        return Cause("permuted", CONSISTENT, ("data",), about=about)
    if not everyone:
        if later and norm < ALIKE and _share(_flat(a), _flat(b)) >= ALIKE:
            return Cause("optimizer", CONSISTENT, ("data", "scaled"), about=about)
        about |= {} if _telling(a, one) else {"few": True}
        return Cause("data", CONSISTENT, ("optimizer",) if later else (), about=about)
    together = about["coherence"] = coherence(a, b)
    least = UNLIKE if later else ALIKE
    apart = norm >= least and len(a) > 1 and together < (1 + 1 / len(a)) / 2
    if later:
        first, second = ("data", "optimizer") if apart else ("optimizer", "data")
        return Cause(first, CONSISTENT, (second,), about=about)
    if len(one.calls) > len(a) and dtype.kind in "iu":  # sizes and numbers, as DDP's
        return Cause("other", CONSISTENT, ("data",), about=about)
    if len(one.calls) > len(a):  # the root's alone
        return Cause("data", CONSISTENT, ("other",), about={"root": one.first.root, **about})
    if apart:
        return Cause("data", CONSISTENT, ("other",), about=about)
    for name, least, most in ROUNDED_BEFORE:
        if least <= norm <= most:
            about |= {"dtype": name, "before": True}
            return Cause("cast", CONSISTENT, ("data", "other"), about=about)
    return Cause("other", CONSISTENT, ("data",), about=about)


def _scaled(
    found: Found, a: Arrays, b: Arrays, everyone: bool, later: bool, about: dict[str, Any]
) -> Cause | None:
    """The cause if operands are those of a times a constant."""
    likely = _likely(found)
    each = [factor_of(x, y, likely) for x, y in zip(a, b, strict=True)]
    if any(factor is None for factor in each):
        return None
    factors: list[Factor] = [factor for factor in each if factor is not None]
    common = factor_of(_flat(a), _flat(b), likely)
    if common is None:
        if len({factor.name for factor in factors}) == 1:
            return None
        named = {rank: f.value for rank, f in zip(found.ranks, factors, strict=True)}
        name = "factor" if everyone else "scaled"
        return Cause(name, CONSISTENT, about={"factors": named, **about})
    known = {**_named(common), **about}
    sure = _sure(common) if _telling(a, found.events[0]) else CONSISTENT
    if later and everyone and not (common.exact and Fraction(common.name) in likely):
        return Cause("optimizer", CONSISTENT, ("factor",), about=known)
    others = () if sure == PROVEN else ("data",)
    return Cause("factor" if everyone else "scaled", sure, others, about=known)


def _telling(operands: Arrays | None, event: Event) -> bool:
    """Whether operands have so many values that a relation between them cannot be an accident.

    A few counts or flags may change places, or be halved, for any reason.
    """
    if operands is None:
        return sum(size_of(call) for call in event.calls.values()) >= 4 * TELLING
    values = [np.unique(x.astype(np.complex128)) for x in _flat(operands)]
    return np.unique(np.concatenate(values)).size >= TELLING


def _same_total(found: Found, one: Event, other: Event, norm: float) -> bool:
    """Whether results are equal up to rounding, although operands differ by more."""
    if one.first.operation not in REDUCING or one.first.op not in ("SUM", "AVG"):
        return False
    a, b = (_results(run, event) for run, event in _sided(found))
    operands = _operands(found.pairs.a, one, one.ranks)
    if a is None or b is None:
        return False
    bound = _bound(one, other, a, operands)
    return _norm(a, b) <= bound and norm > 100 * bound


# ---------------------------------------------------------------- data


def _sure(factor: Factor) -> str:
    return PROVEN if factor.exact else CONSISTENT


def _named(factor: Factor) -> dict[str, Any]:
    return {"factor": factor.value, "factor_name": factor.name}


def _likely(found: Found) -> list[Fraction]:
    """Factors of the numbers of ranks."""
    sizes = {found.pairs.a.ranks, found.pairs.b.ranks, *(len(e.ranks) for e in found.events)}
    if not found.pairs.same:
        a, b = found.pairs.a.ranks, found.pairs.b.ranks
        return [Fraction(b, a), Fraction(a, b)]
    return [each for n in sorted(sizes) if n > 1 for each in (Fraction(n), Fraction(1, n))]


def _operands(run: Run, event: Event, ranks: Sequence[int]) -> Arrays | None:
    """The operands of these ranks; None without whole arrays."""
    calls = [event.calls[rank] for rank in ranks if rank in event.calls]
    found = [run.arrays(call.operands) for call in calls if call.operands]
    return None if not found or any(each is None for each in found) else found  # type: ignore[return-value]


def _results(run: Run, event: Event) -> list[Any] | None:
    call = next((c for c in event.calls.values() if c.results), event.first)
    return run.arrays(call.results) or None


def _alike(a: Arrays, b: Arrays) -> bool:
    kinds = [[[(x.dtype, x.shape) for x in each] for each in side] for side in (a, b)]
    return kinds[0] == kinds[1]


def _flat(side: Arrays) -> list[Any]:
    return [x for each in side for x in each]


def _share(a: Sequence[Any], b: Sequence[Any]) -> float:
    """The share of elements that differ; other weights change nearly all of a gradient."""
    found = difference(a, b)
    return found.differing / max(found.elements, 1)


def _not_finite(a: Sequence[Any], b: Sequence[Any]) -> dict[str, Any]:
    """How many elements are NaN or infinite in one run alone, for those that have some."""
    if any(x.dtype.kind not in "fcV" for x in a):
        return {}
    sides = [[np.isfinite(x.astype(np.complex128)) for x in side] for side in (a, b)]
    found = {
        name: int(sum(np.count_nonzero(~x & y) for x, y in zip(one, other, strict=True)))
        for name, one, other in (("a", *sides), ("b", *sides[::-1]))
    }
    return {"not_finite": found} if any(found.values()) else {}


def _norm(a: Sequence[Any], b: Sequence[Any]) -> float:
    """The relative norm; infinite if shapes differ, or NaN and infinities stand elsewhere."""
    if [(x.dtype, x.shape) for x in a] != [(x.dtype, x.shape) for x in b]:
        return float("inf")
    found = difference(a, b)
    return float("inf") if found.not_finite else found.relative_norm


def _bound(one: Event, other: Event, results: Sequence[Any], operands: Arrays | None) -> float:
    """The threshold of rounding for the results of two events."""
    known = None
    if operands is not None and one.first.operation == "all_reduce":
        known = condition(operands, results)
    dtype = np.dtype(results[0].dtype) if results else np.dtype(np.float32)
    reductions = [event.first.reduction for event in (one, other)]
    return rounding_threshold(dtype, [len(one.ranks), len(other.ranks)], known, reductions)
