"""The specification of a fold: FoldSpec, and FoldPart for a fold that is done in parts.
Both are checked when they are made, and are hashable."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from .formats import FormatInfo
from .operators import check_op
from .orders import COMPENSATED, EXACT, FIXED
from .rounding import check_counter, check_rounding
from .schedules import Exact, Order, Schedule, check_order
from .wires import WireInfo

#: The accumulators of order="fixed", and their bits.
FIXED_TYPES = {"int8": 8, "int16": 16, "int32": 32}


@dataclass(frozen=True)
class FoldSpec:
    """A reduction over a group's members, to the bits of the numerics contract.

    **Arguments**:

    - `op`: "sum", "prod", "max", "min", "logical_and" or "logical_or". "max" and "min" let NaN win
      and put -0 below +0.
    - `order`: "linear", "reverse", "tree", "ring", "kahan" and "neumaier" (linear, with the errors
      of additions kept and added), "exact" (the exact sum of all members, rounded once), "fixed"
      (a sum of integers, of the dtype `accumulate`, int32 for None), or a
      `fallback.schedules.Schedule`. The last five take all members at once, and a Schedule takes
      no `cut_axis`.
    - `accumulate`: the dtype that sums and products are rounded to after every operation. None is
      the members' own, but float32 for bfloat16 and float16 for the 8-bit formats. An exact sum is
      rounded to it once, and None is then `out_dtype`. The two parts of a complex member are
      accumulated in it, or in its parts. Integers wrap in an integer `accumulate`, and in their own
      dtype if it is a floating-point one. A `fallback.formats.FormatInfo` stands for any format.
    - `out_dtype`: the dtype of the result, of the members' kind. None is the members' dtype.
    - `rounding`, `seed`: "nearest" or "stochastic", and the key of its random numbers. Complex
      values are always rounded to nearest.
    - `divisor`: divides the fold in the computing type, before the one rounding to `out_dtype`.
      With `divide="members"` it divides each member instead, and the quotient is rounded, to
      nearest, to the accumulator.
    - `cut_axis`: for "ring" only: the value axis (0 is the first after the batch) that is cut into
      equal slices, one per member. None cuts the flattened value.
    - `wire`: what is sent is rounded to it, a `fallback.wires.WireInfo`. `gathered` says whether
      the result is sent to all members.
    - `groups_of`, `across`: the members are folded in groups of so many, and their results by the
      FoldSpec `across`, whose `divisor`, `out_dtype` and `gathered` are those of this one.
    - `stream`: the second word of the key of random numbers.

    Specs are immutable and hashable and compare by value.

    **Raises**: ValueError for a field outside these. Whether the fields fit the members is checked
    when a fold is planned.

    >>> FoldSpec(order="ring", accumulate="float16").accumulate
    dtype('float16')
    >>> FoldSpec(op="mean")
    Traceback (most recent call last):
    ...
    ValueError: op='mean': expected one of 'sum', 'prod', 'max', 'min', 'logical_and', 'logical_or'
    """

    op: str = "sum"
    order: Order = "linear"
    accumulate: DTypeLike | FormatInfo | None = None
    out_dtype: DTypeLike | None = None
    rounding: str = "nearest"
    seed: int = 0
    divisor: int | None = None
    cut_axis: int | None = None
    wire: WireInfo | None = None
    gathered: bool = True
    groups_of: int | None = None
    across: FoldSpec | None = None
    stream: int = 0
    divide: str = "result"
    #: Whether `fallback.sends` folds it: what is sent is rounded, or members grouped or divided.
    in_phases: bool = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_op(self.op)
        check_order(self.order)
        check_rounding(self.rounding)
        if self.cut_axis is not None and isinstance(self.order, Schedule):
            raise ValueError(
                f"cut_axis={self.cut_axis}: expected None for an order that is a Schedule"
            )
        if is_exact(self.order):
            check_exact(self.op, self.accumulate, self.rounding)
        if self.order == FIXED:
            check_fixed(self.op, self.accumulate, self.rounding)
        if self.order in COMPENSATED:
            check_compensated(self.op, self.order, self.accumulate, self.rounding)
        check_sends(self.op, self.order, self.wire, self.groups_of, self.across)
        check_divide(self.op, self.order, self.divide, self.across)
        changed: dict[str, Any] = {"seed": check_counter("seed", self.seed)}
        if self.accumulate is not None and not isinstance(self.accumulate, FormatInfo):
            changed["accumulate"] = np.dtype(self.accumulate)
        if self.out_dtype is not None:
            changed["out_dtype"] = np.dtype(self.out_dtype)
        for name, value in changed.items():
            object.__setattr__(self, name, value)
        settings = (self.op, self.order, self.accumulate, self.out_dtype, self.rounding)
        numbers = self.seed, self.divisor, self.cut_axis
        phases = self.wire is not None or self.groups_of is not None or self.order == FIXED
        object.__setattr__(self, "in_phases", phases or self.divide != "result")
        sends = self.wire, self.gathered, self.groups_of, self.across, self.stream, self.divide
        object.__setattr__(self, "_hash", hash((*settings, *numbers, *sends)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def stochastic(self) -> bool:
        """Whether stochastic rounding is requested."""
        return self.rounding == "stochastic"

    @property
    def plain(self) -> FoldSpec:
        """The spec without wire and levels."""
        if not self.in_phases and self.gathered:
            return self
        none: dict[str, Any] = {"wire": None, "groups_of": None, "across": None}
        return replace(self, gathered=True, divide="result", **none)


def check_sends(op: str, order: Any, wire: WireInfo | None, groups_of: Any, across: Any) -> None:
    """ValueError for a wire or levels that an operator or an order does not take."""
    if (groups_of is None) != (across is None):
        raise ValueError(
            f"groups_of={groups_of!r}, across={across!r}: expected both, or neither of them"
        )
    if groups_of is not None and not (
        isinstance(groups_of, (int, np.integer))
        and not isinstance(groups_of, bool)
        and groups_of > 0
    ):
        raise ValueError(f"groups_of={groups_of!r}: expected a positive number of members")
    if wire is None and across is None:
        return
    what = "wire" if wire is not None else "groups_of"
    if op != "sum" or (across is not None and across.op != "sum"):
        raise ValueError(f"op={op!r} beside {what}: expected op='sum', in across too")
    if order == "engine" or (across is not None and across.order == "engine"):
        raise ValueError(f"order='engine' beside {what}: expected an order of the contract")
    if is_revealed(order) and wire is not None:
        raise ValueError(
            f"order={order!r}, wire: expected no wire, as trees say what is added, and not what is "
            "sent to whom"
        )
    if wire is None or not wire.at_hops:
        return
    if order == FIXED or is_exact(order):
        raise ValueError(
            f"order={order!r}, wire at='hops': expected at='ends', 'members' or 'result'; the "
            "order has no partial sums of the members' kind to send"
        )
    if order in COMPENSATED:
        raise ValueError(
            f"order={order!r}, wire at='hops': expected at='ends', 'members' or 'result', "
            "in text FORMAT@ends; a hop would send the compensation beside the partial sum"
        )


def check_divide(op: str, order: Any, divide: str, across: Any) -> None:
    """ValueError for a division that an operator or an order does not take."""
    if divide not in ("result", "members"):
        raise ValueError(f"divide={divide!r}: expected 'result' or 'members'")
    if divide == "members" and is_revealed(order):
        raise ValueError(
            f"divide='members', order={order!r}: expected 'result', as the trees are those of sums"
        )
    if divide == "members" and (op != "sum" or order == "engine"):
        raise ValueError(f"divide='members', op={op!r}, order={order!r}: expected sums in an order")
    if across is not None and across.divide != "result":
        raise ValueError("divide='members' in across: expected it beside groups_of")


def is_revealed(order: Any) -> bool:
    """Whether an order is a Schedule of trees, which do not say who sends what to whom."""
    return isinstance(order, Schedule) and order.in_trees


def is_exact(order: Any) -> bool:
    """Whether an order adds exactly: "exact", or a Schedule with such a case."""
    if isinstance(order, Schedule):
        return any(isinstance(case.fold, Exact) for case in order.cases)
    return bool(order == EXACT)


def check_exact(op: str, accumulate: Any, rounding: str) -> None:
    """ValueError for an operator or an accumulator that order="exact" does not take."""
    if op == "prod":
        raise ValueError(
            "op='prod', order='exact': expected op='sum', or an operator that does not round; "
            "choose another order for products"
        )
    if not isinstance(accumulate, FormatInfo):
        return
    bits = accumulate.fraction_bits
    if bits > 50:
        raise ValueError(
            f"accumulate, a format of {bits} fraction bits, order='exact': expected at most 50, "
            "or a dtype"
        )
    if rounding == "stochastic" and accumulate.sub_32_bit and bits > 19:
        raise ValueError(
            f"accumulate, a format of {bits} fraction bits, order='exact', rounding='stochastic': "
            "expected at most 19, or rounding='nearest'"
        )


def check_fixed(op: str, accumulate: Any, rounding: str) -> None:
    """ValueError or TypeError for what order="fixed" does not take."""
    if op != "sum" or rounding != "nearest":
        raise ValueError(
            f"op={op!r}, rounding={rounding!r}, order='fixed': expected sums, rounded to nearest"
        )
    if accumulate is not None and (
        isinstance(accumulate, FormatInfo) or np.dtype(accumulate).name not in FIXED_TYPES
    ):
        names = ", ".join(FIXED_TYPES)
        raise TypeError(f"accumulate={accumulate!r}, order='fixed': expected {names} or None")


def check_compensated(op: str, order: Any, accumulate: Any, rounding: str) -> None:
    """ValueError for what the compensated orders do not take."""
    if op == "prod":
        raise ValueError(
            f"op='prod', order={order!r}: expected op='sum', or an operator that does not round; "
            "choose another order for products"
        )
    if rounding != "nearest":
        raise ValueError(
            f"rounding={rounding!r}, order={order!r}: expected 'nearest', as a compensation is the "
            "error of a rounding to nearest; choose another order for stochastic rounding"
        )
    if isinstance(accumulate, FormatInfo) and not accumulate.lowest < 0:
        raise ValueError(
            f"accumulate, an unsigned format, order={order!r}: expected a format of both signs, as "
            "a compensation has either"
        )


def check_room(spec: FoldSpec, members: int) -> None:
    """ValueError if the integers of a level of order="fixed" have no room for its members.

    >>> check_room(FoldSpec(order="fixed", accumulate="int8"), 65)
    Traceback (most recent call last):
    ...
    ValueError: accumulate='int8', order='fixed': 65 members, expected at most 64, for which its
    integers have room
    """
    level: FoldSpec | None = spec
    while level is not None:
        count = min(members, level.groups_of or members)
        name = str(level.accumulate or "int32")
        if level.order == FIXED and count > 1 << (FIXED_TYPES[name] - 2):
            where = "" if level is spec else "across, "
            raise ValueError(
                f"{where}accumulate={name!r}, order='fixed': {count:,} members, expected at most "
                f"{1 << (FIXED_TYPES[name] - 2):,}, for which its integers have room"
            )
        members, level = -(-members // count), level.across


class TreeNodes(NamedTuple):
    """Neighbouring nodes of a tree over `total` members: nodes `first` and on of a level.

    Level 0 holds the members. Each level above has half as many nodes, rounded up.
    """

    level: int
    first: int
    total: int


class Extent(NamedTuple):
    """A FoldPart without its partial result: `before` says whether there is one."""

    window: tuple[int, int] | None = None
    before: int = 0
    final: bool = True
    nodes: TreeNodes | None = None


@dataclass(frozen=True, eq=False)
class FoldPart:
    """The part of a larger fold that the given members are.

    **Arguments**:

    - `window`: `(first, total)` says that the members hold, flattened, elements `first` and on of
      a value of `total` elements, in every batch entry. The ring's blocks and the random numbers
      are then those of the whole value, so that a value too large for the memory can be folded in
      pieces. It excludes a `cut_axis`.
    - `partial`, `before`: the result of folding the `before` members visited earlier, an array
      of a member's shape and of `partial_dtype(members' dtype, accumulate, op)`. The first member
      visited here is combined with it. For "linear" and "reverse" only ("reverse" goes from the
      last member given to the first). A block of a ring is a linear fold that starts at its member.
    - `final`: False if more members follow. The result is then the partial result, in the same
      dtype, and `divisor` and `out_dtype` are left to the fold that ends with True. A tree takes
      False too: the results of subtrees of one power of two of members each (the last may have
      fewer) are members of the tree that ends it, with the same `accumulate` and with the
      `out_dtype` and `divisor` of the whole.
    - `nodes`: for "tree" only: `(level, first, total)` says that the members are nodes `first` and
      on of that level (0: the members themselves, else subtrees of 2**level members) of a tree over
      `total` members. The random numbers are then those of the whole tree. A tree that is folded
      in parts and draws random numbers needs it.

    **Raises**: ValueError for values outside these.

    >>> FoldPart(window=(4, 10)).final
    True
    """

    window: tuple[int, int] | None = None
    partial: Any = None
    before: int = 0
    final: bool = True
    nodes: tuple[int, int, int] | None = None
    #: What plans of folds depend on.
    extent: Extent = field(init=False, repr=False)

    def __post_init__(self) -> None:
        before = operator.index(self.before)
        if not 0 <= before < 2**64:
            raise ValueError(
                f"before={self.before!r}: expected the number of members folded before these"
            )
        if (self.partial is None) != (before == 0):
            found = "none is given" if self.partial is None else "one is given"
            expected = "one where it is not 0" if before else "none where it is 0"
            raise ValueError(f"partial, beside before={before}: {found}, expected {expected}")
        window = nodes = None
        if self.window is not None:
            first, total = map(operator.index, self.window)
            window = first, total
        if self.nodes is not None:
            nodes = TreeNodes(*map(operator.index, self.nodes))
        object.__setattr__(self, "extent", Extent(window, before, bool(self.final), nodes))


_SPEC = {each.name for each in fields(FoldSpec) if each.init}
_PART = ("window", "partial", "before", "final", "nodes")

_spec = lru_cache(maxsize=256, typed=True)(FoldSpec)  # checking one takes longer than a small fold


def run_arguments(
    *, batch_ndim: int = 0, call: int = 0, places: Any = 0, out: Any = None, **given: Any
) -> dict[str, Any]:
    """The arguments of `run_fold` for the keywords of `fold`.

    **Arguments**:

    - `batch_ndim`, `call`, `out`: as for `run_fold`; `places` is its `batch_offset`.
    - `given`: fields of FoldSpec and of FoldPart.

    **Raises**: TypeError for any other keyword, and what FoldSpec and FoldPart raise.
    """
    part = {name: given.pop(name) for name in _PART if name in given}
    unknown = given.keys() - _SPEC
    if unknown:
        raise TypeError(f"fold() got an unexpected keyword argument {min(unknown)!r}")
    try:
        spec = _spec(**given)
    except TypeError:  # a value is not hashable, or wrong
        spec = FoldSpec(**given)
    return {
        "spec": spec,
        "part": FoldPart(**part) if part else None,
        "batch_ndim": batch_ndim,
        "call": call,
        "batch_offset": places,
        "out": out,
    }
