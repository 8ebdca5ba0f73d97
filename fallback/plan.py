"""Plans of folds: all that follows from spec, part, dtype and shape, decided once and cached.
NumPy and CUDA share them; each lays out and cuts up the work by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .arguments import check_batch, check_cut, check_nodes, check_window
from .arithmetic import Arithmetic
from .formats import FormatInfo, kind_of
from .graphs import adders_of
from .orders import COMPENSATED, EXACT
from .schedules import (
    ChainSchedule,
    CompiledOrder,
    GraphSchedule,
    Order,
    ReductionGraph,
    Schedule,
    compile_order,
)
from .spec import Extent, FoldSpec, TreeNodes, check_exact, is_revealed
from .wire_info import WireInfo


@dataclass(frozen=True, eq=False)
class FoldPlan:
    """A fold of `count` members of one dtype and shape.

    **Attributes**:

    - `spec`, `dtype`, `count`, `shape`, `batch_ndim`: as requested.
    - `arithmetic`: dtypes, operator and roundings.
    - `order`: the order that the kernels follow.
    - `extent`: which part of a fold this is.
    - `slice`: for a ring with a `cut_axis`, the positions of that axis in one slice.
    """

    spec: FoldSpec
    dtype: np.dtype[Any]
    count: int
    shape: tuple[int, ...]
    batch_ndim: int
    arithmetic: Arithmetic
    order: CompiledOrder
    extent: Extent
    slice: int | None

    @property
    def batch(self) -> tuple[int, ...]:
        """The shape of the batch."""
        return self.shape[: self.batch_ndim]

    @property
    def value(self) -> tuple[int, ...]:
        """The shape of one batch entry's value."""
        return self.shape[self.batch_ndim :]

    @property
    def folded(self) -> int:
        """The number of members folded after this part."""
        nodes = self.extent.nodes
        return nodes.total if nodes else self.extent.before + self.count

    @property
    def tree(self) -> TreeNodes:
        """Where in a tree the members are; without `nodes` they are all of it."""
        return self.extent.nodes or TreeNodes(0, 0, self.count)

    @property
    def total(self) -> int:
        """The number of elements of the whole value."""
        window = self.extent.window
        return window[1] if window else math.prod(self.value)

    @property
    def in_blocks(self) -> bool:
        """Whether the order of an element's members depends on the block that it is in."""
        return self.order == "ring" or isinstance(self.order, ChainSchedule | GraphSchedule)


class SentPlan(NamedTuple):
    """A fold of which partial sums or members are sent.

    **Attributes**:

    - `fold`: without the wire.
    - `wire`: what is sent is rounded to it.
    - `first_is_sent`: whether, of two values that are added in a graph, the first is sent.
    - `at_result`: whether the result is sent round.
    """

    fold: FoldPlan
    wire: WireInfo
    first_is_sent: bool
    at_result: bool


@lru_cache(maxsize=1024)
def plan_fold(
    spec: FoldSpec,
    extent: Extent | None,
    dtype: np.dtype[Any],
    count: int,
    shape: tuple[int, ...],
    batch_ndim: int,
) -> FoldPlan:
    """Check that spec and extent fit such members, and plan the fold.

    `extent` is a part's; None: the whole fold.

    **Raises**: ValueError and TypeError for arguments that do not fit.
    """
    if spec.in_phases:
        raise ValueError(
            "wire, groups_of, order='fixed': expected a fold as a whole; folds in parts do not "
            "take them"
        )
    extent = extent or Extent()
    check_batch(batch_ndim, shape)
    value = shape[batch_ndim:]
    window = check_window(extent.window, math.prod(value), spec.cut_axis)
    order = compile_order(
        _order_that_matters(spec, dtype),
        members=count,
        elements=window[1] if window else math.prod(value),
        itemsize=dtype.itemsize,
    )
    arithmetic = _arithmetic(spec, extent.final, dtype, count, order == EXACT)
    _check_extent(spec, extent, dtype, count, arithmetic)
    if isinstance(order, ReductionGraph | GraphSchedule) and order.is_wide:
        _check_wide(spec, arithmetic, order)
    if order == EXACT and arithmetic.exact and is_revealed(spec.order):
        check_exact(spec.op, spec.accumulate, spec.rounding)
    if order == EXACT and not arithmetic.exact:
        order = "linear"  # the same bits in any order
    if order in COMPENSATED and not (_adds_floats(spec, dtype) and count > 1):
        order = "linear"  # nothing is lost
    length = None
    if order == "ring" and spec.cut_axis is not None:
        length = check_cut(spec.cut_axis, value, count)
    return FoldPlan(spec, dtype, count, shape, batch_ndim, arithmetic, order, extent, length)


def _check_wide(
    spec: FoldSpec, arithmetic: Arithmetic, order: ReductionGraph | GraphSchedule
) -> None:
    """ValueError for what additions of several terms do not take."""
    directed = any(adder and adder.to_sum != "nearest-even" for adder in adders_of(order))
    if directed and str(arithmetic.accumulator) not in ("float16", "bfloat16", "float32"):
        raise ValueError(
            f"accumulate, {arithmetic.accumulator}: expected float16, bfloat16 or float32 for sums "
            "that the order rounds in another way than to nearest"
        )
    if spec.op != "sum" or arithmetic.draws_steps:
        raise ValueError(
            f"op={spec.op!r}, rounding={spec.rounding!r}: expected sums, rounded to nearest, by "
            "adders of more than two terms"
        )


def _order_that_matters(spec: FoldSpec, dtype: np.dtype[Any]) -> Order:
    order = spec.order
    if not isinstance(order, Schedule):
        return order
    return order.of(dtype) if order.concerns(spec.op, dtype) else "linear"


@lru_cache(maxsize=256)
def _arithmetic(
    spec: FoldSpec, final: bool, dtype: np.dtype[Any], count: int, exact: bool
) -> Arithmetic:
    accumulator = spec.accumulate
    if accumulator is not None and not isinstance(accumulator, FormatInfo):
        accumulator = np.dtype(accumulator)
    from_zero = False
    if isinstance(spec.order, Schedule):
        own = spec.order.accumulator(spec.op, dtype)  # which checks the type
        accumulator = accumulator or own
        from_zero = spec.order.adds_zero(spec.op, dtype, count)
    out = dtype if spec.out_dtype is None else np.dtype(spec.out_dtype)
    exact = exact and _adds_floats(spec, dtype)
    if exact and accumulator is None:
        accumulator = out  # the exact sum is rounded once
    return Arithmetic(
        spec.op, dtype, accumulator, out, spec.divisor, spec.stochastic, final, from_zero, exact
    )


def _adds_floats(spec: FoldSpec, dtype: np.dtype[Any]) -> bool:
    """Whether the fold has sums that are rounded."""
    return spec.op == "sum" and kind_of(dtype) in ("float", "complex")


def _check_extent(
    spec: FoldSpec, part: Extent, dtype: np.dtype[Any], count: int, arithmetic: Arithmetic
) -> None:
    """ValueError unless members can be folded in such a part."""
    order, whole = spec.order, not part.before and part.final
    if part.before >= 2**64 - count:
        raise ValueError(
            f"before={part.before!r}: expected the number of members folded before these"
        )
    if order != "tree" and part.nodes is not None:
        raise ValueError(f"nodes={tuple(part.nodes)!r}: expected None for order={order!r}")
    if isinstance(order, Schedule) and not whole:
        raise ValueError(
            "order, a Schedule: expected all members at once, and not partial, before or "
            "final=False"
        )
    if arithmetic.exact and not whole:
        raise ValueError(
            "order='exact': expected all members at once, and not partial, before or final=False; "
            "the exact sum of some members has no dtype"
        )
    if order in COMPENSATED and _adds_floats(spec, dtype) and not whole:
        raise ValueError(
            f"order={order!r}: expected all members at once, and not partial, before or "
            "final=False; a partial result lacks the compensation"
        )
    if order == "ring" and not whole:
        raise ValueError(
            "order='ring': expected all members at once, and not partial, before or final=False; "
            "block b of a ring is the linear fold that starts at member b, in its window"
        )
    if order != "tree":
        return
    if part.before:
        raise ValueError(
            "order='tree': expected no partial; a tree over the results of subtrees is a fold of "
            "its own"
        )
    if part.nodes is not None:
        check_nodes(part.nodes, part.final, count)
    elif arithmetic.draws and not part.final:
        raise ValueError(
            "order='tree', rounding='stochastic', final=False: expected nodes, which say where in "
            "the tree these members are, to number its random numbers"
        )
