"""Schedules: the folds of real engines as plain data, beside the four orders that have names.
A schedule, a number of members and a size compile to a chain schedule or a reduction graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from .formats import kind_of, real_of
from .graphs import (
    ChainSchedule,
    GraphSchedule,
    ReductionGraph,
    binary_additions,
    neighbour_additions,
    pairs_first_additions,
    power_below,
)
from .operators import ARITHMETIC_OPS
from .orders import COMPENSATED, EXACT, FIXED, ORDERS, ring_bounds
from .trees import Trees, compile_trees

__all__ = [
    "Balanced",
    "Binary",
    "Case",
    "ChainSchedule",
    "CompiledOrder",
    "Exact",
    "Fold",
    "GraphSchedule",
    "Loops",
    "Order",
    "ReductionGraph",
    "Schedule",
    "Segments",
    "Tree",
    "Trees",
    "Walk",
    "check_order",
    "compile_order",
    "neighbours",
]

MIB = 1 << 20


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _set_number(given: Any, name: str, least: int | None = None) -> None:
    """Make the field an int; raise an error unless it is an integer, of at least `least`."""
    value = getattr(given, name)
    what = f"{type(given).__name__}: {name}={value!r}"
    if not _is_integer(value):
        raise TypeError(f"{what}: expected an integer")
    if least is not None and value < least:
        raise ValueError(f"{what}: expected at least {least}")
    object.__setattr__(given, name, int(value))


def _set_range(given: Case, name: str, least: int) -> None:
    """Make the field two ints, or (int, None), from `least` on; raise an error if it is not."""
    value = getattr(given, name)
    pair = isinstance(value, tuple) and len(value) == 2
    if not pair or not _is_integer(value[0]) or not (value[1] is None or _is_integer(value[1])):
        raise TypeError(f"Case: {name}={value!r}: expected two integers, or (integer, None)")
    first, last = value
    if first < least or (last is not None and last < first):
        raise ValueError(f"Case: {name}={value!r}: expected {least} <= first <= last")
    object.__setattr__(given, name, (int(first), None if last is None else int(last)))


@dataclass(frozen=True)
class Balanced:
    """One block per member; the first `elements % members` blocks have one element more."""

    def blocks(self, members: int, elements: int, itemsize: int) -> list[int]:
        """Where the blocks begin and end."""
        return ring_bounds(elements, members)


@dataclass(frozen=True)
class Segments:
    """Blocks of whole segments: gloo's cut.

    The number of segments is a multiple of the members, at least `least` per member, and so large
    that no segment is longer than `most` bytes. All segments have one length, and the last is what
    is left.
    """

    most: int = MIB
    least: int = 2

    def __post_init__(self) -> None:
        _set_number(self, "most", 1)
        _set_number(self, "least", 1)

    def blocks(self, members: int, elements: int, itemsize: int) -> list[int]:
        """Where the blocks begin and end; blocks behind the value's end are empty."""
        longest = itemsize * max(1, self.most // itemsize)
        wanted = max(-(-elements * itemsize // longest), self.least * members)
        each = -(-wanted // members)
        segment = -(-elements * itemsize // (each * members))
        block = each * -(-segment // itemsize)
        return [min(block * index, elements) for index in range(members + 1)]


@dataclass(frozen=True)
class Loops:
    """Loops over `members` chunks of `chunk` bytes each, in each of `channels` parts: NCCL's cut.

    The last loop's chunks share what is left, in multiples of `align` bytes: the last of them may
    be short or empty. Parts are multiples of `align` bytes as well, the last one what is left.
    """

    chunk: int
    align: int = 16
    channels: int = 1

    def __post_init__(self) -> None:
        for name in ("chunk", "align", "channels"):
            _set_number(self, name, 1)

    def blocks(self, members: int, elements: int, itemsize: int) -> list[int]:
        """Where the blocks begin and end, `members` of them in each loop."""
        unit = max(1, self.align // itemsize)
        whole = max(unit, self.chunk // itemsize // unit * unit)
        part = _multiple(-(-elements // self.channels), unit)
        edges = [0]
        for first in range(0, elements, part or 1):
            end = min(first + part, elements)
            for start in range(first, end, members * whole):
                rest = min(end - start, members * whole)
                chunk = min(whole, _multiple(-(-rest // members), unit))
                edges += [min(start + chunk * (b + 1), start + rest) for b in range(members)]
        return edges


Cut = Balanced | Segments | Loops


@dataclass(frozen=True)
class Walk:
    """A chain: members one after the other, from `start` on and around, up (`step` 1) or down (-1).

    With a `cut` every block has a chain of its own, and block b starts at member `start + b`.
    TypeError and ValueError refuse other values, here and in all parts of a schedule.
    """

    start: int = 0
    step: int = 1
    cut: Cut | None = None

    def __post_init__(self) -> None:
        for name in ("start", "step"):
            _set_number(self, name)
        if self.step not in (1, -1):
            raise ValueError(f"Walk: step={self.step!r}: expected 1 or -1")
        if self.cut is not None and not isinstance(self.cut, Cut):
            raise TypeError(
                f"Walk: cut={self.cut!r}: expected Balanced(), Segments(), Loops() or None"
            )


@dataclass(frozen=True)
class Tree:
    """Neighbours in pairs, level by level; an odd one passes up unchanged.

    `pairs_first`: with p the largest power of two of at most R members, the first R - p pairs
    (0, 1), (2, 3), ... are added first, and the tree is one over the p values that remain.
    """

    pairs_first: bool = False


@dataclass(frozen=True)
class Binary:
    """A tree in which every node adds its first child, itself and its second child, in this order.

    A node r of level l (which has 2**l nodes, numbered on from the level above) has the children
    r + 2**l and r + 2**(l + 1).
    """


@dataclass(frozen=True)
class Exact:
    """The exact sum of all members, rounded once."""


Fold = Walk | Tree | Binary | Exact | Trees


@dataclass(frozen=True)
class Case:
    """A fold, and where it applies: members from..to, and bytes from..below (None: no limit).

    `fewer_than`: only for values of fewer elements than there are "members", or than "power", the
    largest power of two of at most that many.
    """

    fold: Fold
    members: tuple[int, int | None] = (1, None)
    bytes: tuple[int, int | None] = (0, None)
    fewer_than: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.fold, Fold):
            raise TypeError(f"Case: fold={self.fold!r}: expected a Walk, Tree, Binary or Exact")
        for name, least in (("members", 1), ("bytes", 0)):
            _set_range(self, name, least)
        if self.fewer_than not in (None, "members", "power"):
            raise ValueError(
                f"Case: fewer_than={self.fewer_than!r}: expected 'members', 'power' or None"
            )

    def holds(self, members: int, elements: int, itemsize: int) -> bool:
        """Whether this case applies to such a value."""
        fewest, most = self.members
        least, below = self.bytes
        size = elements * itemsize
        limits = {None: elements + 1, "members": members, "power": power_below(members)}
        return (
            fewest <= members
            and (most is None or members <= most)
            and least <= size
            and (below is None or size < below)
            and elements < limits[self.fewer_than]
        )


@dataclass(frozen=True)
class Schedule:
    """The fold of an engine: the first of its `cases` that holds.

    `hops`: the wire dtype, to which partial results are rounded if no accumulator is given:
    "default" is the contract's accumulator, "own" the members' own type.
    `from_zero`: the fold starts from +0, so that no sum is -0.
    `formats`: the floating-point and complex types that are added in this way (none named: all).

    >>> ring = Schedule((Case(Walk(cut=Balanced())),))
    >>> compile_order(ring, members=3, elements=10, itemsize=4)
    'ring'
    >>> down = Schedule((Case(Walk(start=-1, step=-1, cut=Balanced())),))
    >>> compile_order(down, members=3, elements=10, itemsize=4)
    ChainSchedule(edges=(0, 4, 7, 10), starts=(2, 0, 1), step=-1)
    """

    cases: tuple[Case, ...]
    hops: str = "default"
    from_zero: bool = False
    formats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        cases = self.cases
        if not isinstance(cases, tuple) or not all(isinstance(case, Case) for case in cases):
            raise TypeError(f"Schedule: cases={cases!r}: expected a tuple of Case")
        if not cases:
            raise ValueError("Schedule: cases=(): expected at least one Case")
        if self.hops not in ("default", "own"):
            raise ValueError(f"Schedule: hops={self.hops!r}: expected 'default' or 'own'")

    @property
    def in_trees(self) -> bool:
        """Whether a case is of trees, which do not say who sends what to whom."""
        return any(isinstance(case.fold, Trees) for case in self.cases)

    def adds_zero(self, op: str, dtype: np.dtype[Any], members: int) -> bool:
        """Whether a fold has +0 added to it; a single member is its own sum."""
        sums = op == "sum" and members > 1 and kind_of(dtype) in ("float", "complex")
        return self.from_zero and sums

    def concerns(self, op: str, dtype: np.dtype[Any]) -> bool:
        """Whether the order of such members matters; where it does not, they need no case."""
        return True

    def of(self, dtype: np.dtype[Any]) -> Schedule:
        """The order of members of one type."""
        return self

    def accumulator(self, op: str, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
        """The default accumulator of such members; None is the contract's.

        TypeError for values that the engine adds in another way.
        """
        if op not in ARITHMETIC_OPS or kind_of(dtype) not in ("float", "complex"):
            return None
        if self.formats and dtype.name not in self.formats:
            raise TypeError(
                f"{dtype.name} members: the order's schedule is known for {', '.join(self.formats)}"
            )
        return real_of(dtype) if self.hops == "own" else None

    def fold_of(self, members: int, elements: int, itemsize: int) -> Fold:
        """The fold that such a value has; ValueError if no case is known."""
        for case in self.cases:
            if case.holds(members, elements, itemsize):
                return case.fold
        raise ValueError(
            f"{members} members of {elements} elements of {itemsize} bytes: the order's schedule "
            f"has no case for them; it is known for {_known(self)}"
        )


Order = str | Schedule
#: The order that kernels follow. The orders with names have fast code paths.
CompiledOrder = str | ChainSchedule | ReductionGraph | GraphSchedule


def check_order(order: Order) -> Order:
    """Return `order`; ValueError if it is neither one of the names of orders nor a Schedule."""
    names = (*ORDERS, EXACT, FIXED, *COMPENSATED)
    if isinstance(order, Schedule) or order in names:
        return order
    raise ValueError(
        f"order={order!r}: expected one of {', '.join(map(repr, names))}, or a Schedule"
    )


@lru_cache(maxsize=256)
def compile_order(order: Order, *, members: int, elements: int, itemsize: int) -> CompiledOrder:
    """The order that kernels follow for such members."""
    if isinstance(order, str):
        return order
    fold = order.fold_of(members, elements, itemsize)
    if isinstance(fold, Exact):
        return EXACT
    if isinstance(fold, Trees):
        return compile_trees(fold, members)
    if isinstance(fold, Walk):
        return _chains(fold, members, elements, itemsize)
    if isinstance(fold, Binary):
        return _graph(binary_additions(members), members)
    power = power_below(members)
    if not fold.pairs_first or members == power:
        return "tree"
    return _graph(pairs_first_additions(members), members)


def _chains(chain: Walk, members: int, elements: int, itemsize: int) -> str | ChainSchedule:
    if chain.cut is None:
        edges, starts = [0, elements], [chain.start % members]
    elif chain == Walk(cut=Balanced()):
        return "ring"
    else:
        edges = chain.cut.blocks(members, elements, itemsize)
        starts = [(chain.start + block) % members for block in range(len(edges) - 1)]
    found = [(a, b, start) for (a, b), start in zip(pairwise(edges), starts, strict=True) if a < b]
    if members == 1 or {(start, chain.step) for _, _, start in found} <= {(0, 1)}:
        return "linear"
    if {(start, chain.step) for _, _, start in found} == {(members - 1, -1)}:
        return "reverse"
    ends = (0, *(b for _, b, _ in found))
    return ChainSchedule(ends, tuple(start for _, _, start in found), chain.step)


@lru_cache(maxsize=16)
def neighbours(members: int) -> ReductionGraph:
    """The additions of order="tree"."""
    return ReductionGraph(tuple(neighbour_additions(members)))


def _graph(additions: list[tuple[int, int]], members: int) -> str | ReductionGraph:
    return ReductionGraph(tuple(additions)) if members > 1 else "linear"


def _multiple(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _known(schedule: Schedule) -> str:
    """The numbers of members that the cases apply to, for people."""
    ranges = sorted({case.members for case in schedule.cases}, key=lambda pair: pair[0])
    return ", ".join(f"{a} members on" if b is None else f"{a} to {b} members" for a, b in ranges)
