"""The same elements, cut into calls otherwise: DDP's buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, permutations

from .chains import size_of
from .pairing import Pairs
from .runs import Event, Run, Traced, same_elements

__all__ = ["Cut", "cut_after", "cut_of", "is_table_of_buckets"]

MANY = 5
"""Calls whose order is tried in all ways; of more, forwards and backwards."""


@dataclass(frozen=True)
class Cut:
    """Calls of one place in both runs, which carry as many elements, in other parts.

    **Attributes**: `a` and `b` are the sizes; `equal` says whether the elements, joined, have the
    same bits on all ranks, as by digests.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    equal: bool


def is_table_of_buckets(event: Event) -> bool:
    """Whether a call may be DDP's broadcast of its buckets: of integers, in one dimension."""
    call = event.first
    return (
        call.operation == "broadcast"
        and len(call.kinds) == 1
        and call.kinds[0][0] == "int32"
        and len(call.kinds[0][1]) == 1
    )


def cut_after(pairs: Pairs, at: int) -> Cut | None:
    """The first place behind a pair at which the runs cut the same elements otherwise.

    Only the first calls that reduce are looked at: later ones may differ for other reasons.
    """
    i, j = pairs.pairs[at]
    if i is None or j is None:
        return None
    return next(_cuts(pairs.a, i, pairs.b, j), None)


def cut_of(a: Run, i: int, b: Run, j: int) -> Cut | None:
    """The cut of the calls that begin at these events, one of each run."""
    sides = [_visit(run.events, k) for run, k in ((a, i), (b, j))]
    ends = _meet(*([size_of(event.first) for event in side] for side in sides))
    if ends is None:
        return None
    sides = [side[:end] for side, end in zip(sides, ends, strict=True)]
    one, two = (tuple(size_of(event.first) for event in side) for side in sides)
    kinds = {(e.first.operation, e.first.op, e.first.kinds[0][0]) for side in sides for e in side}
    if one == two or len(kinds) != 1:
        return None
    return Cut(one, two, _joined(*sides))


def _meet(a: Sequence[int], b: Sequence[int]) -> tuple[int, int] | None:
    """How many sizes of each list have the same sum, the fewest.

    >>> _meet([6, 5, 6, 5], [4, 7, 4, 7])
    (2, 2)
    >>> _meet([6, 5], [11])
    (2, 1)
    """
    sums = [list(accumulate(side)) for side in (a, b)]
    common = min({*sums[0]} & {*sums[1]}, default=0)
    return (sums[0].index(common) + 1, sums[1].index(common) + 1) if common else None


def _cuts(a: Run, i: int, b: Run, j: int) -> Iterator[Cut]:
    """The cuts of the first visit of each place that both runs come to behind these events."""
    starts: list[dict[str, int]] = []
    for run, begin in ((a, i), (b, j)):
        found: dict[str, int] = {}
        for k in range(begin, len(run.events)):
            call = run.events[k].first
            if call.op is not None and call.kinds:
                found.setdefault(call.site, k)
        starts.append(found)
    # Places in the order in which the runs come to them: files and lines may have other names.
    for i, j in zip(starts[0].values(), starts[1].values(), strict=False):
        cut = cut_of(a, i, b, j)
        if cut is not None:
            yield cut


def _visit(events: Sequence[Event], begin: int) -> list[Event]:
    """The calls of one place that follow each other."""
    first = events[begin].first
    found = []
    for event in events[begin:]:
        call = event.first
        if (call.site, call.operation, event.ranks) != (
            first.site,
            first.operation,
            events[begin].ranks,
        ) or not call.kinds:
            break
        found.append(event)
    return found


def _joined(a: Sequence[Event], b: Sequence[Event]) -> bool:
    """Whether the operands of both lists of calls have the same elements, in some order of calls.

    DDP's first buckets are in the order of its parameters, backwards; later ones in the order in
    which gradients are ready.
    """
    ways: list[tuple[int, ...]] = [tuple(range(len(b))), tuple(range(len(b)))[::-1]]
    if len(b) <= MANY:
        ways = list(permutations(range(len(b))))
    others: list[tuple[int, ...]] = [tuple(range(len(a)))]
    if len(a) <= MANY and len(b) == 1:
        others = list(permutations(range(len(a))))
    return any(_same(a, b, other, way) for way in ways for other in others)


def _same(a: Sequence[Event], b: Sequence[Event], one: Sequence[int], other: Sequence[int]) -> bool:
    for rank in a[0].ranks:
        sides: list[list[Traced]] = [[], []]
        for side, events, order in ((sides[0], a, one), (sides[1], b, other)):
            for k in order:
                call = events[k].calls.get(rank)
                if call is None or not call.operands:
                    return False
                side += call.operands
        if not same_elements(*sides):
            return False
    return True
