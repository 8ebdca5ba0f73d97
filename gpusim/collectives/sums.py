"""The sums over the replicas: psum, pmean, psum_scatter, and all_reduce with any operator."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from ..groups import Groups
from ..libraries import to_library_of
from ..reduction import Reduction, ReductionLike, as_reduction
from .distributed import algorithms
from .distributed.layout import Layout
from .fold import Fold, fold_all, fold_groups, fold_spec, to_replicas
from .kernels import FoldSpec, replace_fields
from .operand import Array, Operand, Result
from .record import AxisIndexGroups, AxisName, Call, ShapeDtype, collective

# psum, pmean and all_reduce


def _sum_distributed(layout: Layout, x: Operand, *, groups: Groups | None, fold: Fold) -> Result:
    return algorithms.reduce(layout, _summable(x, fold), groups, fold)


def _sum_result(operands: list[ShapeDtype], members: int) -> list[ShapeDtype]:
    ((shape, dtype),) = operands
    return [(shape, np.dtype(np.int32) if dtype.kind == "b" else dtype)]


def _sum(x: Operand, *, groups: Groups | None, fold: Fold, mean: bool = False) -> Result:
    x = _summable(x, fold)
    if groups is None:
        return Result(fold_all(x, fold, mean=mean), False)
    return to_replicas(fold_groups(x, groups, fold, mean=mean), x, groups)


def _summable(x: Operand, fold: Fold) -> Operand:
    """bool is summed and multiplied as int32."""
    if x.dtype.kind == "b" and fold.reduction.op in ("sum", "prod"):
        return x.astype(np.dtype(np.int32))
    return x


def _sum_fold(reduction: Reduction, size: int, dtype: np.dtype[Any]) -> FoldSpec | None:
    return None if dtype.kind == "b" else fold_spec(reduction)


@collective(
    local=_sum,
    distributed=_sum_distributed,
    result=_sum_result,
    folds=True,
    groups="any",
    replicated=True,
    scalar=operator.mul,
    identity=lambda dtype: 0,
    fold=_sum_fold,
)
def psum(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    reduction: ReductionLike | None = None,
) -> Call:
    """The sum over the replicas, on every replica.

    **Arguments**:

    - `x`: a pytree of arrays of any shape and dtype. bool is summed as int32; integers wrap. For a
      Python number that is the same everywhere, the result is size times the number.
    - `axis_name`: a mapped axis, or a tuple of them; integers (from 0) are axes of `x` itself.
    - `axis_index_groups`: lists of replica indices, each index once; sums within each group.
    - `reduction`: order, accumulator and rounding: what `gpusim.as_reduction` takes, a Reduction or
      a text such as "ring accumulate=float32"; None is that of the `gpusim.reduction` context.

    **Returns**: the sums, in the shapes and dtypes of `x` (without its positional axes).

    **Raises**: NameError for an axis that is not bound; ValueError for groups that are not a
    partition of the replicas, or an axis name that comes twice.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> x = np.array([1, 2, 3, 4])
    >>> gpusim.vmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)
    array([10, 10, 10, 10])
    >>> pairs = [[0, 3], [1, 2]]
    >>> gpusim.vmap(lambda x: x * lax.psum(x, "i", axis_index_groups=pairs), axis_name="i")(x)
    array([ 5, 10, 15, 20])
    >>> gpusim.collectives.psum(x, groups=[[0, 1], [2, 3]])  # on stacked arrays
    Result(value=array([3, 3, 7, 7]), mapped=True)
    """
    return Call(psum, (x,), axis_name, axis_index_groups, reduction)


psum.transpose = psum  # every replica receives the sum, so every replica's cotangent comes back


def _mean(x: Operand, *, groups: Groups | None, fold: Fold) -> Result:
    if x.dtype.kind not in "biu":
        return _sum(x, groups=groups, fold=fold, mean=True)
    total, mapped = _sum(x, groups=groups, fold=fold)
    floating = _quotient_dtype(x.dtype)
    if groups is None:
        return Result(_quotient(total, x.size, floating), mapped)
    sizes = [groups.group_sizes[g] for g in groups.assignment]
    if x.listed:
        each = zip(total, sizes, strict=True)
        return Result([_quotient(value, size, floating) for value, size in each], mapped)
    return Result(_quotient(total, _column(sizes, total, floating), floating), mapped)


def _mean_distributed(layout: Layout, x: Operand, *, groups: Groups | None, fold: Fold) -> Result:
    if x.dtype.kind not in "biu":
        return algorithms.reduce(layout, x, groups, fold, mean=True)
    total, mapped = algorithms.reduce(layout, _summable(x, fold), groups, fold)
    floating = _quotient_dtype(x.dtype)
    if groups is None:
        return Result(_quotient(total, layout.size, floating), mapped)
    sizes = [groups.group_sizes[groups.assignment[m]] for m in layout.local.tolist()]
    return Result(_quotient(total, _column(sizes, total, floating), floating), mapped)


def _mean_result(operands: list[ShapeDtype], members: int) -> list[ShapeDtype]:
    ((shape, dtype),) = operands
    return [(shape, _quotient_dtype(dtype) if dtype.kind in "biu" else dtype)]


def _mean_fold(reduction: Reduction, size: int, dtype: np.dtype[Any]) -> FoldSpec | None:
    spec = fold_spec(reduction)
    return None if dtype.kind in "biu" else replace_fields(spec, divisor=size)


def _quotient_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which integer totals are divided."""
    return np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)


def _quotient(total: Array, size: Any, floating: np.dtype[Any]) -> Array:
    divided = total.astype(floating)
    divided /= size  # in place: a scalar remains an array
    return divided


def _column(sizes: list[int], like: Array, dtype: np.dtype[Any]) -> Array:
    """A number for each replica, to be broadcast over its value."""
    column: Array = to_library_of(like, sizes, dtype).reshape(-1, *[1] * (like.ndim - 1))
    return column


@collective(
    local=_mean,
    distributed=_mean_distributed,
    result=_mean_result,
    folds=True,
    groups="any",
    replicated=True,
    scalar=lambda value, size: value * size / size,
    fold=_mean_fold,
)
def pmean(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    reduction: ReductionLike | None = None,
) -> Call:
    """The mean over the replicas, on every replica: the sum, divided by the group's size.

    The division comes before the last rounding, in the computing type. Integers and bool are
    summed first and give float32 (64-bit integers float64).

    Arguments and errors are those of `psum`, except that positional axes are a ValueError.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> gpusim.vmap(lambda x: x - lax.pmean(x, "i"), axis_name="i")(np.array([1.0, 2.0, 6.0]))
    array([-2., -1.,  3.])
    >>> gpusim.collectives.pmean(np.arange(4.0), groups=[[0], [1, 2, 3]])
    Result(value=array([0., 2., 2., 2.]), mapped=True)
    """
    return Call(pmean, (x,), axis_name, axis_index_groups, reduction)


pmean.transpose = pmean


@collective(
    local=_sum,
    distributed=_sum_distributed,
    result=_sum_result,
    folds=True,
    groups="any",
    replicated=True,
    op=None,
    fold=_sum_fold,
)
def all_reduce(
    x: Any,
    axis_name: AxisName,
    *,
    reduction: ReductionLike,
    axis_index_groups: AxisIndexGroups = None,
) -> Call:
    """The fold over the replicas with any operator of `Reduction`.

    Arguments and errors are those of `psum`; bool is summed and multiplied as int32. The logical
    operators take any dtype and give 0 or 1 in it.

    >>> import numpy as np, gpusim
    >>> gpusim.collectives.all_reduce(np.array([1, 2, 3, 4]), reduction=gpusim.Reduction(op="prod"))
    Result(value=array(24), mapped=False)
    """
    chosen = as_reduction(reduction, "all_reduce: reduction")  # None too is refused
    return Call(all_reduce, (x,), axis_name, axis_index_groups, chosen)
