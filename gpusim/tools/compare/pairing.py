"""The events of two runs in pairs, and on which ranks the data of a pair differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from .alignment import Pair, align, purity
from .runs import Call, Event, Run, same_elements

__all__ = ["REPLICATED", "Pairs", "describe", "pair_runs", "terms_that_differ"]

REPLICATED = ("all_reduce", "all_gather", "broadcast")
"""Operations whose result all ranks have: runs of different numbers of ranks are compared by it."""

Unequal = tuple[list[int] | None, list[int] | None]
"""The ranks whose operands, and whose results, differ; None where that is not known."""


@dataclass(frozen=True)
class Pairs:
    """Two runs and the pairs of their events, in an order that both have.

    **Attributes**:

    - `a`, `b`: the runs; the calls of b's compiled programs are in a's order.
    - `pairs`: positions in both runs; None where one run lacks the event.
    - `same`: whether both have the same number of ranks. Else only results that all ranks receive
      are compared.
    """

    a: Run
    b: Run
    pairs: list[Pair]
    same: bool

    def events(self, at: int) -> tuple[Event | None, Event | None]:
        """The events of a pair."""
        i, j = self.pairs[at]
        return (
            None if i is None else self.a.events[i],
            None if j is None else self.b.events[j],
        )

    def alike(self, at: int) -> bool:
        """Whether both events of a pair are the same call."""
        one, other = self.events(at)
        return (
            one is not None
            and other is not None
            and _token(self.a, one, self.same) == _token(self.b, other, self.same)
        )

    def unequal(self, at: int) -> Unequal:
        """Where the data of a pair of events differ; (None, None) if a run lacks one."""
        one, other = self.events(at)
        if one is None or other is None:
            return None, None
        return _unequal(one, other, self.same)

    def equal(self, at: int) -> bool:
        """Whether a pair is the same call, with data that are known to be equal."""
        operands, results = self.unequal(at)
        known = operands == [] if self.same else operands is None
        return self.alike(at) and known and results == []


def pair_runs(a: Run, b: Run) -> Pairs:
    """The pairs of the events of two runs: the same calls, by a diff of what is called."""
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
    return Pairs(a, b, _paired(a, b, pairs), same)


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


def _unequal(a: Event, b: Event, same: bool) -> Unequal:
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


def terms_that_differ(a: Event, b: Event) -> tuple[str, ...]:
    """The terms in which two calls differ: "operation", "op", "dtypes", "shapes", ..."""
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


def describe(call: Call) -> str:
    """A call in words: all_reduce SUM of float32[100]."""
    kinds = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in call.kinds[:3])
    more = ", ..." if len(call.kinds) > 3 else ""
    name = f"{call.operation} {call.op or ''}".strip()
    return f"{name} of {kinds}{more}" if kinds else name
