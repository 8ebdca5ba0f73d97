"""The sums over the replicas: psum, pmean, and all_reduce with any operator."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..formats import kernel_format
from ..groups import Groups
from ..libraries import to_library_of
from ..reduction import Reduction, current
from .groupwise import fold_all, fold_groups, spread
from .linear import linear
from .operand import Array, GroupsLike, Operand, Result, Values


@linear
def psum(
    x: Values,
    *,
    groups: GroupsLike = None,
    reduction: Reduction | None = None,
    batch_ndim: int = 0,
    call: int | None = None,
    places: Any = None,
) -> Result:
    """The sum over the replicas, in the order and with the roundings of a `Reduction`.

    **Arguments**: ``x`` stacked (R, *batch, *s), or a list of R arrays (*batch, *s). ``groups`` may
    differ in size. ``reduction`` None is the one of the surrounding `gpusim.reduction` context, and
    counts as one of its calls; with one given, ``call`` is 0 unless set. ``places`` (stochastic
    rounding only) are the linear indices of the batch entries over the other mapped axes,
    None: their own, from 0.

    **Returns** (*batch, *s), not mapped; with groups (R, *batch, *s), mapped. Same dtype; bool is
    summed as int32, integers wrap.

    **Raises** ValueError where ``reduction.op`` is not ``"sum"`` or the groups are no partition.

    >>> psum(np.arange(8.0).reshape(4, 2))
    Result(value=array([12., 16.]), mapped=False)
    >>> psum(np.arange(4), groups=[[0, 1], [2, 3]])
    Result(value=array([1, 1, 5, 5]), mapped=True)
    """
    operand = Operand(x, batch_ndim, "psum")
    partition = operand.groups(groups, uneven=True)
    how = sum_arguments(reduction, call, "psum")
    return _reduce(operand, partition, places, how)


psum.transpose = psum  # every replica receives the sum, so every replica's cotangent comes back


@linear
def pmean(
    x: Values,
    *,
    groups: GroupsLike = None,
    reduction: Reduction | None = None,
    batch_ndim: int = 0,
    call: int | None = None,
    places: Any = None,
) -> Result:
    """The mean over the replicas: the fold of `psum`, divided by the size of each group.

    Arguments, shapes and errors as `psum`. Floats and complex keep their dtype and are divided
    before the final rounding; integers are summed (wrapping) and divided in float64 if they have
    64 bits, else in float32, which is the dtype of the result.

    >>> pmean(np.arange(4.0), groups=[[0], [1, 2, 3]])
    Result(value=array([0., 2., 2., 2.]), mapped=True)
    """
    operand = Operand(x, batch_ndim, "pmean")
    partition = operand.groups(groups, uneven=True)
    how = sum_arguments(reduction, call, "pmean")
    if operand.dtype.kind not in "biu":
        return _reduce(operand, partition, places, how, mean=True)
    total, mapped = _reduce(operand, partition, places, how)
    return Result(_divide(total, partition, operand), mapped)


pmean.transpose = pmean


def all_reduce(
    x: Values,
    *,
    reduction: Reduction,
    groups: GroupsLike = None,
    batch_ndim: int = 0,
    call: int = 0,
    places: Any = None,
) -> Result:
    """The fold over the replicas with any operator of `Reduction`.

    Arguments, shapes and errors as `psum`; bool is summed and multiplied as int32. The logical
    operators take any dtype and give 0 or 1 in it.

    >>> all_reduce(np.array([1, 2, 3, 4]), reduction=Reduction(op="prod"))
    Result(value=array(24), mapped=False)
    """
    operand = Operand(x, batch_ndim, "all_reduce")
    partition = operand.groups(groups, uneven=True)
    return _reduce(operand, partition, places, fold_arguments(reduction, call, "all_reduce"))


def fold_arguments(reduction: Reduction, call: int, collective: str) -> dict[str, Any]:
    """A Reduction and a call number as arguments of the fold kernel."""
    if not isinstance(reduction, Reduction):
        raise TypeError(f"{collective}: reduction must be a gpusim.Reduction, got {reduction!r}")
    return {
        "op": reduction.op,
        "order": "linear" if reduction.order == "engine" else reduction.schedule,
        "accumulate": kernel_format(reduction.accumulate),
        "rounding": reduction.rounding,
        "seed": reduction.seed,
        "call": call,
    }


def sum_arguments(reduction: Reduction | None, call: int | None, collective: str) -> dict[str, Any]:
    """The same for a collective that sums, where None is the surrounding context's reduction."""
    state = current() if reduction is None else None
    given = state.reduction if state is not None else reduction
    if isinstance(given, Reduction) and given.op != "sum":
        raise ValueError(
            f"{collective} needs a Reduction with op='sum', got op={given.op!r}; "
            "gpusim.collectives.all_reduce takes any"
        )
    if call is None:
        call = state.next_calls(1) if state is not None else 0
    assert given is not None
    return fold_arguments(given, call, collective)


def _reduce(
    operand: Operand,
    groups: Groups | None,
    places: Any,
    how: dict[str, Any],
    *,
    mean: bool = False,
) -> Result:
    if operand.dtype == np.bool_ and how["op"] in ("sum", "prod"):
        operand = operand.astype(np.dtype(np.int32))
    if groups is None:
        divisor = operand.size if mean else None
        return Result(fold_all(operand, places, divisor=divisor, **how), False)
    return spread(fold_groups(operand, groups, places, mean=mean, **how), operand, groups)


def _divide(total: Any, groups: Groups | None, operand: Operand) -> Any:
    """Integer totals over the sizes of their replicas' groups, as JAX divides them."""
    floating = quotient_dtype(operand)
    if groups is None:
        return quotient(total, operand.size, floating)
    sizes = [groups.group_sizes[g] for g in groups.assignment]
    if operand.listed:
        return [quotient(t, size, floating) for t, size in zip(total, sizes, strict=True)]
    column = to_library_of(total, sizes, floating).reshape(-1, *[1] * (total.ndim - 1))
    return quotient(total, column, floating)


def quotient_dtype(operand: Operand) -> np.dtype[Any]:
    """What integers are divided in."""
    return np.dtype(np.float64 if operand.dtype.itemsize == 8 else np.float32)


def quotient(total: Array, size: Any, floating: np.dtype[Any]) -> Array:
    """Totals over sizes, in a floating-point dtype."""
    divided = total.astype(floating)
    divided /= size  # in place: a scalar remains an array
    return divided
