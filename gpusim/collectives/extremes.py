"""The extremes over the replicas: pmax, pmin, pargmax and pargmin; and the replicas' numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec

import numpy as np

from ..groups import Groups
from ..libraries import on_device, to_library_of
from ..reduction import Reduction
from .distributed import algorithms
from .distributed.layout import Layout
from .fold import MAX, MIN, Fold, fold_all, fold_groups, to_replicas
from .kernels import kernels
from .operand import Array, Operand, Result, read_only
from .record import AxisIndexGroups, AxisName, Call, Collective, ShapeDtype, collective, same_shape

P = ParamSpec("P")

#: Larger than every replica's number; JAX's mark for "no replica holds the value".
NO_REPLICA = np.iinfo(np.int32).max


def _ordered(x: Operand) -> Operand:
    if x.dtype.kind == "c":
        raise TypeError(f"{x.collective}: complex numbers have no order, got {x.dtype}")
    return x


# pmax and pmin


def _extreme(fold: Fold, x: Operand, groups: Groups | None) -> Result:
    _ordered(x)
    if groups is None:
        return Result(read_only(x[0]) if x.same else fold_all(x, fold), False)
    if x.same:
        shared = read_only(x[0])
        each = np.broadcast_to(shared, (x.size, *shared.shape))
        return Result([shared] * x.size if x.listed else each, True)
    return to_replicas(fold_groups(x, groups, fold), x, groups)


def _extreme_distributed(fold: Fold, layout: Layout, x: Operand, groups: Groups | None) -> Result:
    return algorithms.reduce(layout, _ordered(x), groups, fold)


def _lowest(dtype: np.dtype[Any]) -> Any:
    """The smallest number of a dtype: the maximum of no values."""
    if dtype.kind == "b":
        return False
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def _highest(dtype: np.dtype[Any]) -> Any:
    """The largest number of a dtype: the minimum of no values."""
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.inf


def _extreme_of(
    reduction: Reduction, identity: Callable[[np.dtype[Any]], Any]
) -> Callable[[Callable[P, Call]], Collective[P]]:
    """The record of the elementwise extreme that a Reduction gives."""
    return collective(
        local=partial(_extreme, Fold(reduction)),
        distributed=partial(_extreme_distributed, Fold(reduction)),
        result=same_shape,
        groups="any",
        replicated=True,
        scalar=lambda value, size: value,
        identity=identity,
    )


@_extreme_of(MAX, _lowest)
def pmax(x: Any, axis_name: AxisName, *, axis_index_groups: AxisIndexGroups = None) -> Call:
    """The elementwise maximum over the replicas, on every replica. NaN wins, and -0 is below +0.

    Arguments and errors are those of `psum`; complex values are a TypeError. There is no
    derivative.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> x = np.array([[1, 8], [5, 2]])
    >>> gpusim.vmap(lambda x: lax.pmax(x, "i"), axis_name="i", out_axes=None)(x)
    array([5, 8])
    """
    return Call(pmax, (x,), axis_name, axis_index_groups)


@_extreme_of(MIN, _highest)
def pmin(x: Any, axis_name: AxisName, *, axis_index_groups: AxisIndexGroups = None) -> Call:
    """The elementwise minimum over the replicas, on every replica. NaN wins, and -0 is below +0.

    Arguments and errors are those of `psum`; complex values are a TypeError. There is no
    derivative.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> x = np.array([[1, 8], [5, 2]])
    >>> gpusim.vmap(lambda x: lax.pmin(x, "i"), axis_name="i", out_axes=None)(x)
    array([1, 2])
    """
    return Call(pmin, (x,), axis_name, axis_index_groups)


# pargmax and pargmin


def _first_holder(fold: Fold, x: Operand) -> Result:
    """The first replica whose value compares equal to the extreme, or is a NaN as it is."""
    _ordered(x)
    extreme = x[0] if x.same else fold_all(x, fold)
    return Result(_lowest_holder(x, extreme, range(1 if x.same else x.size)), False)


def _first_holder_distributed(fold: Fold, layout: Layout, x: Operand) -> Result:
    """Each instance finds its own first holder; the result is the smallest of them."""
    extreme = algorithms.reduce(layout, _ordered(x), None, fold).value
    holder = _lowest_holder(x, extreme, layout.local.tolist())
    each = np.broadcast_to(holder, (len(layout.local), *holder.shape))
    candidates = Operand(each, x.batch_ndim, x.collective)
    return algorithms.reduce(layout, candidates, None, Fold(MIN))


def _lowest_holder(x: Operand, extreme: Array, numbers: Sequence[int]) -> Array:
    """The smallest of the replicas' ascending numbers where their values equal the extreme."""
    if on_device(extreme):  # as many launches for any number of replicas
        held = _equal_on_device(x.stacked()[: len(numbers)], extreme)
        number = to_library_of(extreme, numbers, np.int32)[np.argmax(held, axis=0)]
        first: Array = np.where(np.any(held, axis=0), number, np.int32(NO_REPLICA))
        return first
    holder: Array = np.full_like(extreme, NO_REPLICA, dtype=np.int32, order="C", subok=False)
    for place, number in reversed([*enumerate(numbers)]):
        value = x[place]
        held = value == extreme
        if value.dtype.kind not in "biu":
            held |= value != value  # the extreme is NaN then, and no number equals it
        np.copyto(holder, np.int32(number), where=held)
    return holder


def _equal_on_device(values: Array, extreme: Array) -> Array:
    """values == extreme, by bits: CuPy takes subnormal numbers for zeros, and has no 8-bit formats.

    Beyond equal bits two zeros are equal, and so are two NaNs.
    """
    if values.dtype.kind in "biu":
        return values == extreme
    word = f"u{values.dtype.itemsize}"
    bits, most = values.view(word), extreme.view(word)
    equal: Array = (bits == most) | ((bits | most) << 1 == 0)
    nans, any_nan = (np.isnan(kernels(x).round_to(x, np.float32)) for x in (values, extreme))
    return np.where(any_nan, nans, equal)  # in some formats NaN has the bits of -0


def _number_result(operands: list[ShapeDtype], members: int) -> list[ShapeDtype]:
    return [(operands[0][0], np.dtype(np.int32))]


def _single(name: str, axis_name: AxisName) -> AxisName:
    if isinstance(axis_name, (tuple, list)):
        raise TypeError(f"{name} takes a single axis name, but got {axis_name!r}")
    return axis_name


def _holder_of(reduction: Reduction) -> Callable[[Callable[P, Call]], Collective[P]]:
    """The record of the number of the first replica that holds the extreme."""
    return collective(
        local=partial(_first_holder, Fold(reduction)),
        distributed=partial(_first_holder_distributed, Fold(reduction)),
        result=_number_result,
        replicated=True,
    )


@_holder_of(MAX)
def pargmax(x: Any, axis_name: AxisName) -> Call:
    """The index (int32) of the first replica that holds the maximum, for each element.

    NaN wins, as in np.argmax: where replicas have NaNs, the index is that of the first of them. +0
    and -0 are equal. (JAX does not say what NaNs give: the largest int32 where its pmax returns
    NaN, else the index of the largest number.)

    **Arguments**: `x` is a pytree of arrays, `axis_name` one mapped axis.

    **Raises**: TypeError for a tuple of axes.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> x = np.array([3.0, 7.0, 7.0])
    >>> gpusim.vmap(lambda x: lax.pargmax(x, "i"), axis_name="i", out_axes=None)(x)
    array(1, dtype=int32)
    """
    return Call(pargmax, (x,), _single("pargmax", axis_name))


@_holder_of(MIN)
def pargmin(x: Any, axis_name: AxisName) -> Call:
    """The index (int32) of the first replica that holds the minimum, for each element.

    Arguments and errors are those of `pargmax`.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> x = np.array([3.0, 7.0, 1.0])
    >>> gpusim.vmap(lambda x: lax.pargmin(x, "i"), axis_name="i", out_axes=None)(x)
    array(2, dtype=int32)
    """
    return Call(pargmin, (x,), _single("pargmin", axis_name))


def axis_index(size: int) -> Result:
    """Each replica's own number, int32.

    >>> axis_index(3)
    Result(value=array([0, 1, 2], dtype=int32), mapped=True)
    """
    return Result(np.arange(size, dtype=np.int32), True)
