"""The arithmetic of torch.distributed's reductions: gpusim's folds, in the order that was chosen.

torch names an operation (SUM, AVG, ...); a `Reduction` says in which order and precision it adds.
An engine's twin is known for its all-reduce. For its other reductions it says here what is known;
the rest is refused by name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from gpusim.fallback.schedules import Balanced, Case, Schedule, Walk

from .... import collectives
from ....collectives.fold import fold_spec
from ....collectives.kernels import replace_fields, run_fold
from ....libraries import call_on_bits
from ....reduction import Reduction, as_reduction, current
from ....reduction.replay import RevealedOrder
from ....twins import TWINS, nccl_ring
from ..memory import Array

__all__ = [
    "Chooser",
    "FoldCall",
    "OneReduction",
    "ReductionLike",
    "as_chooser",
    "fold",
    "fold_lists",
    "fold_rows",
    "fold_slices",
    "fold_together",
    "multiplied",
]


class FoldCall(NamedTuple):
    """The argument of a callable that chooses a Reduction.

    **Attributes**: `operation` is "all_reduce", "reduce" or "reduce_scatter", `group` the global
    ranks of the group, `dtype` the tensors' ("bfloat16"), and `size` a tensor's number of bytes.
    """

    operation: str
    group: tuple[int, ...]
    dtype: str
    size: int


Chooser = Callable[[FoldCall], Reduction]
#: What `gpusim.as_reduction` takes, or a function of a FoldCall that returns that.
ReductionLike = Reduction | str | PathLike[str] | Mapping[str, Any] | Callable[[FoldCall], Any]

#: An average that multiplies the sum by 1 / R.
RECIPROCAL = "AVG by reciprocal"
BITWISE = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
OTHERS = {"PRODUCT": "prod", "MIN": "min", "MAX": "max"}
BOOLEANS = {"SUM": "MAX", "PRODUCT": "MIN"}


@dataclass(frozen=True)
class OneReduction:
    """A chooser of the same Reduction for each call."""

    reduction: Reduction

    def __call__(self, call: FoldCall) -> Reduction:
        return self.reduction


def as_chooser(given: ReductionLike | None, what: str) -> Chooser | None:
    """A function that chooses the Reduction; None for None.

    **Raises**: TypeError or ValueError for anything but a Reduction, its text or fields, or a
    callable.
    """
    if given is None:
        return None
    if isinstance(given, (Reduction, str, PathLike, Mapping)):
        return OneReduction(_as_reduction(given, what))
    if not callable(given):
        raise TypeError(f"{what}: expected a Reduction, its text or a callable, got {given!r}")
    return lambda call: _as_reduction(given(call), f"{what}({call})")


def _as_reduction(given: Any, what: str) -> Reduction:
    given = as_reduction(given, what)
    if given.op != "sum":
        raise ValueError(f"{what}: expected op='sum', as torch names the operator; got {given!r}")
    if given.order == "engine":
        raise ValueError(f"{what}: order='engine' is for the instances of a World; name a twin")
    return given


def settle(
    chooser: Chooser | None, call: FoldCall, folded: int, leaves: int
) -> tuple[Reduction, int]:
    """The Reduction of a call, and the number of its first tensor for stochastic rounding.

    Without a chooser it is that of the `gpusim.reduction` context, which counts the call. Else
    calls are counted in each group, in `folded`.
    """
    if chooser is not None:
        return chooser(call), folded
    state = current()
    return state.reduction, folded if state.is_default else state.next_calls(leaves)


def fold(
    members: Sequence[Array],
    op: str,
    operation: str,
    reduction: Reduction,
    call: int,
    root: int = 0,
) -> Array:
    """The members folded by torch's operation `op`, as one array of their shape.

    `root` is the rank of the group that a "reduce" is for.

    **Raises**: TypeError for an `op` that the dtype lacks, ValueError for a reduction that the
    twin's engine does in an unknown way.
    """
    values, dtype = list(members), members[0].dtype
    if dtype.kind == "b":
        op = BOOLEANS.get(op, op)
    if op == RECIPROCAL:
        return multiplied(fold(values, "SUM", operation, reduction, call, root), 1 / len(values))
    if op in BITWISE:
        if dtype.kind not in "biu":
            raise TypeError(f"{operation}: {op} is for integers and bool, got {dtype}")
        result: Array = functools.reduce(BITWISE[op], values)
        return result
    if op not in ("SUM", "AVG", *OTHERS):
        known = ", ".join(("SUM", "AVG", *OTHERS, *BITWISE))
        raise TypeError(f"{operation}: expected one of {known}, got ReduceOp.{op}")
    if dtype.kind == "b" and op not in ("MIN", "MAX"):
        raise TypeError(f"{operation}: ReduceOp.{op} is not defined for {dtype}; convert it first")
    if dtype.kind in "iu" and op == "AVG":
        return _divided(fold(values, "SUM", operation, reduction, call, root), len(values))
    if op in ("MIN", "MAX"):  # nothing is rounded, in any order
        reduction = Reduction(op=OTHERS[op])
    elif dtype.kind in "fcV":
        if op == "AVG" and engine_of(reduction) in MULTIPLYING:
            values, op = [multiplied(value, 1 / len(values)) for value in values], "SUM"
        reduction = for_operation(reduction, operation, root)
    else:  # integers wrap, in any order
        reduction = Reduction()
    if operation != "all_reduce" and op in ("SUM", "AVG") and fold_spec(reduction).in_phases:
        divisor = len(values) if op == "AVG" else None  # and the result is not sent round
        spec = replace_fields(fold_spec(reduction), divisor=divisor, gathered=False)
        return run_fold(spec, values, call=call)
    if op == "SUM":
        total = collectives.psum.on(None, values, reduction=reduction, call=call)
    elif op == "AVG":
        total = collectives.pmean.on(None, values, reduction=reduction, call=call)
    else:
        reduction = replace(reduction, op=OTHERS[op])
        total = collectives.all_reduce.on(None, values, reduction=reduction, call=call)
    folded: Array = total.value
    return folded


def _divided(total: Array, count: int) -> Array:
    """A sum of integers divided toward zero, as NCCL divides it after it has wrapped."""
    quotient: Array = total // count
    rounded: Array = quotient + ((total < 0) & (total % count != 0)).astype(total.dtype)
    return rounded


def multiplied(member: Array, factor: Any) -> Array:
    """A member times a factor that is rounded to its dtype, as is the product."""
    dtype = member.dtype
    wide = np.float64 if dtype.itemsize == 8 else np.float32
    product: Array = member * np.asarray(factor, wide).astype(dtype)[()]
    return product


def fold_together(
    leaves: Sequence[Sequence[Array]], op: str, operation: str, reduction: Reduction, call: int
) -> list[Array]:
    """Several tensors of one coalesced call folded; each is a sequence of its members.

    gloo joins them to one value, whose blocks its ring cuts.
    """
    if engine_of(reduction) not in JOINING or len({members[0].dtype for members in leaves}) > 1:
        return [
            fold(members, op, operation, reduction, call + leaf)
            for leaf, members in enumerate(leaves)
        ]
    joined = [
        call_on_bits(np.concatenate, [x.reshape(-1) for x in one])
        for one in zip(*leaves, strict=True)
    ]
    total = fold(joined, op, operation, reduction, call)
    ends = np.cumsum([members[0].size for members in leaves])[:-1].tolist()
    parts = zip(np.split(total, ends), leaves, strict=True)
    return [part.reshape(members[0].shape) for part, members in parts]


def fold_slices(
    members: Sequence[Array], op: str, operation: str, reduction: Reduction, call: int
) -> list[Array]:
    """The members (R, ...), each cut along its first axis into R slices, folded: the R results."""
    values = list(members)
    if op != "SUM" or values[0].dtype.kind not in "fcV" or reduction.order != "ring":
        return list(fold(values, op, operation, reduction, call))
    sums = collectives.psum_scatter.on(
        None, values, reduction=reduction, call=call, scatter_dimension=0, tiled=False
    )
    return list(sums.value)


def fold_rows(
    members: Sequence[Array],
    axes: Sequence[int] | None,
    shape: tuple[int, ...],
    op: str,
    operation: str,
    reduction: Reduction,
    call: int,
) -> list[Array]:
    """As `fold_slices`, of members whose axes are in the order of their memory.

    gloo adds in this order, and cuts the sum in logical order.

    **Arguments**: `axes` are the members' axes in this order, or None if that is the logical one;
    `shape` is (R, ...), into which the members' elements are cut, in logical order.
    """
    if axes is None:
        return fold_slices([_cut(each, shape) for each in members], op, operation, reduction, call)
    back = [*np.argsort(axes), *range(len(axes), members[0].ndim)]
    if engine_of(reduction) in JOINING:
        total = fold(members, op, operation, reduction, call)
        return list(_cut(total.transpose(back), shape))
    logical = [_cut(each.transpose(back), shape) for each in members]
    return fold_slices(logical, op, operation, reduction, call)


def _cut(array: Array, shape: tuple[int, ...]) -> Array:
    """The array in another shape of as many elements; pairs of complex numbers stay pairs."""
    pairs = array.size // max(1, math.prod(shape))
    whole = array if array.flags.c_contiguous else array.copy(order="C")
    return whole.reshape(*shape, *([2] if pairs == 2 else []))


def fold_lists(
    members: Sequence[Sequence[Array]], op: str, operation: str, reduction: Reduction, call: int
) -> list[Array]:
    """As `fold_slices`, where each member is a list of R arrays.

    gloo makes an all-reduce of each array of a list, and one of a tensor.
    """
    if engine_of(reduction) in JOINING:
        columns = zip(*members, strict=True)
        return [fold(column, op, operation, reduction, call) for column in columns]
    stacked = [call_on_bits(np.stack, list(each)) for each in members]
    return fold_slices(stacked, op, operation, reduction, call)


#: Twins of engines that multiply by 1 / R before they add, where torch asks for AVG.
MULTIPLYING = ("nccl-ring", "nccl-tree")

#: Twins of engines that join the tensors of a coalesced all-reduce.
JOINING = ("gloo-ring",)

#: What is known of twins beyond their all-reduce: how they fold in another operation, by its root.
TWIN_ORDERS: dict[tuple[str, str], Callable[[int], str | Schedule]] = {
    ("gloo-ring", "reduce_scatter"): lambda root: "gloo-ring",  # torch makes it of an all-reduce
    ("gloo-ring", "reduce"): lambda root: "gloo-ring",
    # NCCL has rings only for these: blocks are the ranks' slices; a chain ends at the root.
    ("nccl-ring", "reduce_scatter"): lambda root: _nccl(Walk(start=1, cut=Balanced())),
    ("nccl-tree", "reduce_scatter"): lambda root: _nccl(Walk(start=1, cut=Balanced())),
    ("nccl-ring", "reduce"): lambda root: _nccl(Walk(start=root + 1)),
    ("nccl-tree", "reduce"): lambda root: _nccl(Walk(start=root + 1)),
    ("xla-cpu", "reduce_scatter"): lambda root: "xla-cpu",
}


def _nccl(walk: Walk) -> Schedule:
    return replace(nccl_ring(), cases=(Case(walk),))


def engine_of(reduction: Reduction) -> Any:
    """The order by name, or for a revealed one the name of the twin of its engine."""
    order = reduction.order
    return order.family if isinstance(order, RevealedOrder) else order


def for_operation(reduction: Reduction, operation: str, root: int = 0) -> Reduction:
    """A twin's Reduction for another operation than all_reduce."""
    name = reduction.order
    if isinstance(name, RevealedOrder) and operation != "all_reduce":
        if (name.family, operation) in TWIN_ORDERS and name.family == "gloo-ring":
            return reduction  # which torch makes of an all-reduce
        raise ValueError(
            f"{operation}: {name.name} has the order of all_reduce. A function as `reduction` can "
            f"choose another for {operation}"
        )
    if operation == "all_reduce" or not isinstance(name, str) or name not in TWINS:
        return reduction
    order = TWIN_ORDERS.get((name, operation))
    if order is None:
        known = [twin for twin, other in TWIN_ORDERS if other == operation]
        raise ValueError(
            f"{operation}: the order of {name}'s {operation} is not known; it is for "
            f"{', '.join(known)}. A function as `reduction` can choose another for {operation}"
        )
    return replace(reduction, order=order(root))
