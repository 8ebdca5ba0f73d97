"""Two runs compared: the first place where they differ, its cause, and how the difference grows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..twins.inferring import infer
from .alignment import Pair, align, purity
from .difference import Difference, difference
from .runs import Call, Event, Run, same_elements

__all__ = ["Comparison", "Row", "Verdict", "compare", "describe"]

REPLICATED = ("all_reduce", "all_gather", "broadcast")
"""Operations whose result all ranks have: runs of different numbers of ranks are compared by it."""
REDUCING = ("all_reduce", "reduce", "reduce_scatter")


@dataclass(frozen=True)
class Row:
    """An aligned pair of events: positions in both runs, and what differs.

    `operands` and `results` are the numbers of ranks in which they differ, None where that is not
    known; `difference` is that of the results, where they differ and arrays were kept.
    """

    a: int | None
    b: int | None
    operation: str
    place_a: str
    place_b: str
    operands: int | None
    results: int | None
    difference: Difference | None


@dataclass(frozen=True)
class Verdict:
    """The first place where two runs differ, and what lies behind it.

    **Attributes**:

    - `kind`: "collective" (operands are equal and results differ), "operands" (they differ: the
      cause lies before), "results" (operands are not compared), "missing" or "additional" (a call
      of a, or of b, that the other run lacks), "other" (another call), or "end" (a run ends).
    - `a`, `b`: the call in each run; "missing" has no b, "additional" no a.
    - `before_a`, `before_b`: the calls before, behind which the cause lies.
    - `ranks`: those whose operands or results differ.
    - `differs`: for "other": "operation", "op", "dtypes", "shapes", "splits", "root",
      "buckets", "group", "peer", "tag".
    - `difference`: of operands or results, if arrays were kept.
    - `folds`: for "collective", the known folds that give each side's result, by run.
    - `reductions`: for "collective", the Reduction that each run recorded.
    """

    kind: str
    a: Call | None = None
    b: Call | None = None
    before_a: Call | None = None
    before_b: Call | None = None
    ranks: tuple[int, ...] = ()
    differs: tuple[str, ...] = ()
    difference: Difference | None = None
    folds: Mapping[str, list[str] | None] = field(default_factory=dict)
    reductions: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Two runs, the first difference (None if they are equal), and all aligned events."""

    a: Run
    b: Run
    verdict: Verdict | None
    rows: list[Row]

    def record(self) -> dict[str, Any]:
        """The comparison as JSON has it."""
        runs = {
            name: {"path": str(run.path), "ranks": run.ranks, "events": len(run.events)}
            for name, run in (("a", self.a), ("b", self.b))
        }
        return {
            "format": 1,
            "equal": self.verdict is None,
            "runs": runs,
            "verdict": None if self.verdict is None else _plain(asdict(self.verdict)),
            "rows": [_plain(asdict(row)) for row in self.rows],
        }


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
    same = a.ranks == b.ranks
    b = _in_order_of(a, b)
    tokens = [[_token(run, event, same) for event in run.events] for run in (a, b)]
    first = 0
    for one, other, *both in zip(a.events, b.events, *tokens, strict=False):
        if both[0] != both[1] or any(_unequal(one, other, same)):
            break
        first += 1
    rest = tokens[0][first:], tokens[1][first:]
    pairs: list[Pair] = [(k, k) for k in range(first)]
    if rest[0] or rest[1]:
        pairs += [
            (None if i is None else i + first, None if j is None else j + first)
            for i, j in align(*rest, lambda p: _score(a.events[first:], b.events[first:], p))
        ]
    pairs = _paired(a, b, pairs)
    compared = [
        (i, j) for i, j in pairs if i is not None and j is not None
        and None not in _unequal(a.events[i], b.events[j], same)[1:]
    ]  # fmt: skip
    if not compared and (a.events or b.events) and all(None not in pair for pair in pairs):
        raise ValueError(
            f"{a.path} and {b.path} have no results that can be compared; records in folders have "
            "digests (--record FOLDER)"
        )
    rows = [_row(a, b, pair, same) for pair in pairs]
    return Comparison(a, b, _verdict(a, b, pairs, same, folds), rows)


def _in_order_of(a: Run, b: Run) -> Run:
    """b, with the calls of compiled programs in the order in which a has them."""
    keys: list[list[tuple[Any, ...]]] = []
    for run in (a, b):
        seen: Counter[Hashable] = Counter()
        keys.append([])
        for event in run.events:
            call = event.first
            key = (call.program_call, call.operation, call.op, event.ranks)
            keys[-1].append((*key, seen[key]))
            seen[key] += 1
    position = {key: k for k, key in enumerate(keys[0]) if key[0] is not None}
    known = [
        (position[key], event)
        for key, event in zip(keys[1], b.events, strict=True)
        if key in position
    ]
    if not known:
        return b
    ordered = iter(sorted(known, key=lambda pair: pair[0]))
    events = [
        next(ordered)[1] if key in position else event
        for key, event in zip(keys[1], b.events, strict=True)
    ]
    b = copy(b)
    b.events = [replace(event, index=k) for k, event in enumerate(events)]
    return b


def _token(run: Run, event: Event, same: bool) -> Hashable:
    """The part of an event that both runs share where their events correspond."""
    calls = [event.calls[rank] for rank in sorted(event.calls)]
    if not same:
        first = event.first
        return (
            first.operation,
            first.op,
            len(event.ranks) == run.ranks,
            tuple(d for d, _ in first.kinds[:1]),
        )
    return (event.ranks, *((call.rank, _terms(call)) for call in calls))


def _terms(call: Call) -> Hashable:
    kinds = () if call.operation == "recv" else call.kinds
    counts = (call.send_counts, call.receive_counts)
    return (call.operation, call.op, call.root, call.peer, call.tag, kinds, counts)


def _unequal(a: Event, b: Event, same: bool) -> tuple[list[int] | None, list[int] | None]:
    """The ranks whose operands, and whose results, differ; None where that is not known."""
    if not same:
        one, other = (event.first.results for event in (a, b))
        comparable = a.first.operation in REPLICATED and one is not None and other is not None
        if not comparable or [t[:2] for t in one or ()] != [t[:2] for t in other or ()]:
            return None, None
        return None, [] if one == other else [a.first.rank]
    found: list[list[int] | None] = []
    for name in ("operands", "results"):
        ranks: list[int] | None = []
        for rank in sorted(a.calls.keys() & b.calls.keys()):
            one, other = getattr(a.calls[rank], name), getattr(b.calls[rank], name)
            if one is None or other is None:
                if (one is None) != (other is None) and name == "results":
                    continue  # an unfinished call; what it lacks is seen elsewhere
                ranks = None
                break
            if not same_elements(one, other):
                ranks.append(rank)  # type: ignore[union-attr]
        found.append(ranks)
    return found[0], found[1]


def _score(a: Sequence[Event], b: Sequence[Event], pairs: list[Pair]) -> tuple[float, ...]:
    """How likely an alignment is: equal operands, doubled calls, and places that correspond."""
    equal, sites = 0, []
    for i, j in pairs:
        if i is not None and j is not None:
            equal += a[i].first.operands == b[j].first.operands and bool(a[i].first.operands)
            sites.append((a[i].first.site, b[j].first.site))
        else:
            events, k = (a, i) if i is not None else (b, j)
            assert k is not None
            equal += (
                k > 0
                and bool(events[k].first.operands)
                and (events[k].first.operands == events[k - 1].first.results)
            )
    return equal, purity(sites)


def _paired(a: Run, b: Run, pairs: list[Pair]) -> list[Pair]:
    """Pair the removed and inserted events of one block, where their operations correspond."""
    found: list[Pair] = []
    k = 0
    while k < len(pairs):
        block = k
        while block < len(pairs) and None in pairs[block]:
            block += 1
        removed = [i for i, _ in pairs[k:block] if i is not None]
        inserted = [j for _, j in pairs[k:block] if j is not None]
        operations = [
            [run.events[n].first.operation for n in events]
            for run, events in ((a, removed), (b, inserted))
        ]
        if operations[0] == operations[1] or (len(removed) == len(inserted) == 1):
            found += zip(removed, inserted, strict=True)
        else:
            found += pairs[k:block]
        if block < len(pairs):
            found.append(pairs[block])
        k = block + 1
    return found


def _row(a: Run, b: Run, pair: Pair, same: bool) -> Row:
    i, j = pair
    one = None if i is None else a.events[i]
    other = None if j is None else b.events[j]
    known = one or other
    assert known is not None
    operands: list[int] | None = None
    results: list[int] | None = None
    found = None
    if one is not None and other is not None:
        operands, results = _unequal(one, other, same)
        if results:
            found = _difference(a, b, one, other, "results", results)
    return Row(
        i,
        j,
        describe(known.first),
        "" if one is None else one.first.site,
        "" if other is None else other.first.site,
        None if operands is None else len(operands),
        None if results is None else len(results),
        found,
    )


def _difference(
    a: Run, b: Run, one: Event, other: Event, name: str, ranks: Sequence[int]
) -> Difference | None:
    """The difference of operands or results, of all ranks or of one if all have the same."""
    if name == "results" and one.first.operation in REPLICATED:
        ranks = ranks[:1]
    sides: tuple[list[Any], list[Any]] = ([], [])
    for rank in ranks:
        for side, run, event in zip(sides, (a, b), (one, other), strict=True):
            call = event.calls.get(rank, event.first)
            arrays = run.arrays(getattr(call, name))
            if arrays is None:
                return None
            side += arrays
    kinds = [[(x.dtype, x.shape) for x in side] for side in sides]
    return difference(*sides) if kinds[0] == kinds[1] else None


def _verdict(a: Run, b: Run, pairs: list[Pair], same: bool, folds: bool) -> Verdict | None:
    before: tuple[Event | None, Event | None] = (None, None)
    for at, (i, j) in enumerate(pairs):
        one = None if i is None else a.events[i]
        other = None if j is None else b.events[j]
        calls: dict[str, Any] = {
            "a": one and one.first,
            "b": other and other.first,
            "before_a": before[0] and before[0].first,
            "before_b": before[1] and before[1].first,
        }
        if one is None or other is None:
            return _structural(a, b, pairs[at:], calls)
        if _token(a, one, same) != _token(b, other, same):
            differs = _terms_that_differ(one, other)
            return Verdict("other", **calls, differs=differs, error=a.error or b.error)
        operands, results = _unequal(one, other, same)
        if operands or results:
            ranks = tuple(operands or results or ())
            shown = min(ranks)
            calls |= {
                "a": one.calls.get(shown, one.first),
                "b": other.calls.get(shown, other.first),
            }
            calls |= {
                f"before_{name}": _before(run, event, shown)
                for name, run, event in (("a", a, one), ("b", b, other))
            }
        if operands:
            found = _difference(a, b, one, other, "operands", operands)
            return Verdict("operands", **calls, ranks=ranks, difference=found)
        if results:
            found = _difference(a, b, one, other, "results", results)
            if not same or operands is None:
                return Verdict("results", **calls, ranks=ranks, difference=found)
            more: dict[str, Any] = {}
            if one.first.operation in REDUCING:
                sides = (("a", a, one), ("b", b, other))
                more["reductions"] = {name: event.first.reduction for name, _, event in sides}
                if folds:
                    more["folds"] = {name: _folds(run, event) for name, run, event in sides}
            return Verdict("collective", **calls, ranks=ranks, difference=found, **more)
        before = one, other
    return None


def _before(run: Run, event: Event, rank: int) -> Call | None:
    """The call that a rank makes before an event."""
    own = [each for each in run.events[: event.index] if rank in each.calls]
    return own[-1].calls[rank] if own else None


def _structural(a: Run, b: Run, pairs: list[Pair], calls: dict[str, Any]) -> Verdict:
    """A verdict on a block of events that one of the runs lacks."""
    block = next((k for k, pair in enumerate(pairs) if None not in pair), len(pairs))
    removed = [a.events[i] for i, _ in pairs[:block] if i is not None]
    inserted = [b.events[j] for _, j in pairs[:block] if j is not None]
    error = (a.error if inserted else b.error) or a.error or b.error
    if removed and inserted:
        calls |= {"a": removed[0].first, "b": inserted[0].first}
        differs = _terms_that_differ(removed[0], inserted[0])
        if "operation" not in differs and "op" not in differs:
            sizes = [sum(map(_size, events)) for events in (removed, inserted)]
            differs = ("buckets",) if sizes[0] == sizes[1] else differs
        return Verdict("other", **calls, differs=differs, error=error)
    if block == len(pairs) and len(pairs) > 0:
        return Verdict("end", **calls, error=error)
    return Verdict("missing" if removed else "additional", **calls, error=error)


def _size(event: Event) -> int:
    return sum(int(np.prod(shape)) for _, shape in event.first.kinds)


def _terms_that_differ(a: Event, b: Event) -> tuple[str, ...]:
    found: dict[str, None] = {}
    if a.ranks != b.ranks or a.calls.keys() != b.calls.keys():
        found["group"] = None
    for rank in sorted(a.calls.keys() & b.calls.keys()):
        one, other = a.calls[rank], b.calls[rank]
        for name in ("operation", "op", "root", "peer", "tag"):
            if getattr(one, name) != getattr(other, name):
                found[name] = None
        if [dtype for dtype, _ in one.kinds] != [dtype for dtype, _ in other.kinds]:
            found["dtypes"] = None
        if [shape for _, shape in one.kinds] != [shape for _, shape in other.kinds]:
            found["shapes"] = None
        for name in ("send_counts", "receive_counts"):
            if getattr(one, name) != getattr(other, name):
                found["splits"] = None
    return tuple(found)


def _folds(run: Run, event: Event) -> list[str] | None:
    """The known folds that give an event's result; None without arrays, or for other operators."""
    leaves = reduced(run, event)
    if not leaves or event.first.op not in ("SUM", "AVG", "PRODUCT"):
        return None
    if leaves[0][0].dtype.kind not in "fcV":
        return None
    keywords: dict[str, Any] = {"op": "prod"} if event.first.op == "PRODUCT" else {}
    if event.first.op == "AVG":
        keywords["divisor"] = len(event.ranks)
    tried = [max(leaves, key=lambda leaf: leaf[1].size)]
    if len(leaves) > 1 and len({total.dtype for _, total in leaves}) == 1:  # as gloo joins them
        operands, totals = zip(*leaves, strict=True)
        tried.insert(0, (np.concatenate(operands, axis=1), np.concatenate(totals)))
    for inputs, total in tried:
        found = [match.candidate.name for match in infer(inputs, total, **keywords) if match.equal]
        if found:
            recorded = (event.first.reduction or "").partition(" ")[0]
            return sorted(found, key=lambda name: name != recorded)
    return []


def reduced(run: Run, event: Event) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Operands (R, N) and result (N,) of each tensor of a reduction; none without all arrays."""
    calls = [event.calls[rank] for rank in event.ranks if rank in event.calls]
    if event.first.operation not in REDUCING or not event.complete:
        return []
    operands = [run.arrays(call.operands) for call in calls]
    received = calls
    if event.first.operation != "reduce_scatter":
        received = [next((call for call in calls if call.rank == call.root), calls[0])]
    results = [run.arrays(call.results) for call in received]
    if not all(operands) or not all(results):
        return []
    members, parts = (
        [[x.reshape(-1) for x in each or ()] for each in side] for side in (operands, results)
    )
    tensors = [np.stack(row) for row in zip(*members, strict=True)]
    if in_lists(event):
        totals = [part for (part,) in parts]
    else:
        totals = [np.concatenate(row) for row in zip(*parts, strict=True)]
    return list(zip(tensors, totals, strict=True))


def in_lists(event: Event) -> bool:
    """Whether a reduce_scatter has a list of tensors, one for each rank, and not one of all."""
    call = event.first
    one = call.operation == "reduce_scatter" and len(call.results or ()) == 1
    return one and [t[:2] for t in call.operands or ()] == [
        t[:2] for t in call.results or ()
    ] * len(event.ranks)


def describe(call: Call) -> str:
    """A call in words: all_reduce SUM of float32[100]."""
    kinds = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in call.kinds[:3])
    more = ", ..." if len(call.kinds) > 3 else ""
    name = f"{call.operation} {call.op or ''}".strip()
    return f"{name} of {kinds}{more}" if kinds else name
