"""Batched rules of functions that give an array another shape, or its elements another order."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from ....libraries import copy_array, on_device, owner, zeros_like
from ...axis_environment import Axes
from ..align import (
    common_axes,
    lead,
    lead_full,
    shift_axes,
    shift_axis,
    sizes,
    visible_ndim,
    visible_shape,
)
from ..array import Array, MappedArray, holds_mapped, is_scalar, unpack, wrap
from ..dispatch import NoRule, Rule, rule
from ..memory import address, in_order, strided
from .arguments import arrange, merge_visible, parameters, plain, unpack_array

# Shapes.


def _resolved(shape: Any, size: int) -> tuple[int, ...]:
    """`shape` with its -1 worked out, of that size."""
    shape = plain(shape)
    wanted = tuple(
        map(operator.index, shape if isinstance(shape, (tuple, list)) else np.atleast_1d(shape))
    )
    known = math.prod(extent for extent in wanted if extent != -1)
    if wanted.count(-1) == 1 and known:
        wanted = tuple(size // known if extent == -1 else extent for extent in wanted)
    if math.prod(wanted) != size or min(wanted, default=0) < 0:
        raise NoRule  # NumPy's own error, from the per-replica fallback
    return wanted


def _order(order: Any, data: Array, axes: Axes) -> str:
    """'C' or 'F' for any of NumPy's orders."""
    order = "C" if order is None else str(order).upper()
    if order in ("C", "F"):
        return order
    flags = data[(0,) * len(axes)].flags
    if flags.c_contiguous or (order == "A" and not flags.f_contiguous):
        return "C"
    if flags.f_contiguous:
        return "F"
    raise NoRule


def _reversed_axes(data: Array, mapped: int) -> Array:
    return np.transpose(data, [*range(mapped), *reversed(range(mapped, data.ndim))])


def _own_data(value: Any) -> tuple[Array, Axes]:
    """As `unpack_array`, a copy of a scalar's data: it does not change with views of it."""
    data, axes = unpack_array(value)
    return (data.copy() if is_scalar(value) else data), axes


def _reshape(a: Any, shape: Any, order: Any) -> MappedArray:
    data, axes = _own_data(a)
    wanted = _resolved(shape, math.prod(visible_shape(a)))
    if _order(order, data, axes) == "C":
        return wrap(np.reshape(data, sizes(axes) + wanted), axes)
    mapped = len(axes)
    turned = np.reshape(_reversed_axes(data, mapped), sizes(axes) + wanted[::-1])
    return wrap(_reversed_axes(turned, mapped), axes)


@rule(np.reshape)
def reshape(a: Any, /, shape: Any = None, order: Any = "C", *, copy: Any = None, **old: Any) -> Any:
    if copy is not None or old or shape is None:
        raise NoRule
    return _reshape(a, shape, order)


@rule(np.ravel)
def ravel(a: Any, order: Any = "C") -> Any:
    result = _reshape(a, -1 if math.prod(visible_shape(a)) else 0, order)
    if is_scalar(a):
        return result
    data, axes = unpack_array(a)
    flags = data[(0,) * len(axes)].flags
    fortran = _order(order, data, axes) == "F"
    found = unpack(result)[0]
    if (flags.f_contiguous if fortran else flags.c_contiguous) or owner(found) is not owner(data):
        return result
    return wrap(copy_array(found), axes)


@rule(np.resize)
def resize(a: Any, new_shape: Any) -> Any:
    data, axes = unpack_array(a)
    values = merge_visible(data, axes)
    wanted = tuple(np.atleast_1d(plain(new_shape)).tolist())
    if min(wanted, default=0) < 0 or values.shape[-1] == 0:
        raise NoRule
    taken = np.take(values, np.arange(math.prod(wanted)) % values.shape[-1], axis=-1)
    return wrap(np.reshape(taken, sizes(axes) + wanted), axes)


@rule(np.expand_dims)
def expand_dims(a: Any, axis: Any) -> Any:
    data, axes = _own_data(a)
    count = len(axis) if isinstance(axis, (tuple, list)) else 1
    return wrap(np.expand_dims(data, shift_axes(axis, visible_ndim(a) + count, len(axes))), axes)


@rule(np.squeeze)
def squeeze(a: Any, axis: Any = None) -> Any:
    data, axes = unpack_array(a)
    mapped, shape = len(axes), visible_shape(a)
    if axis is None:
        places = tuple(mapped + place for place, extent in enumerate(shape) if extent == 1)
    elif shape:
        places = shift_axes(axis, len(shape), mapped)
    else:
        raise NoRule
    return wrap(np.squeeze(data, places), axes)


@rule(np.broadcast_to)
def broadcast_to(array: Any, shape: Any, subok: bool = False) -> Any:
    wanted = (
        tuple(np.atleast_1d(plain(shape)).tolist()) if np.ndim(shape) == 0 else tuple(plain(shape))
    )
    _, axes = unpack_array(array)
    if np.broadcast_shapes(visible_shape(array), wanted) != wanted:
        raise NoRule  # NumPy's own error, in one replica's shapes
    return wrap(np.broadcast_to(lead(array, axes, len(wanted)), sizes(axes) + wanted), axes)


@rule(np.broadcast_arrays)
def broadcast_arrays(*args: Any, subok: bool = False) -> Any:
    shape = np.broadcast_shapes(*map(visible_shape, args))
    return tuple(
        value
        if isinstance(value, MappedArray) and value.shape == shape
        else broadcast_to(value, shape)
        for value in args
    )


NEW_AXES: dict[tuple[int, int], tuple[Any, ...]] = {
    (1, 0): (None,),
    (2, 0): (None, None),
    (2, 1): (None, ...),
    (3, 0): (None, None, None),
    (3, 1): (None, slice(None), None),
    (3, 2): (..., None),
}
"""Where atleast_1d, 2d and 3d put axes of size 1, by the number wanted and the number there is."""


def at_least(wanted: int) -> Rule:
    """The rule of atleast_1d, atleast_2d, atleast_3d."""

    def batched(*arrays: Any) -> Any:
        results = []
        for value in arrays:
            data, axes = _own_data(value)
            new = NEW_AXES.get((wanted, visible_ndim(value)))
            index = (slice(None),) * len(axes) + (new or (...,))
            same = new is None and isinstance(value, MappedArray)
            results.append(value if same else wrap(data if new is None else data[index], axes))
        return results[0] if len(results) == 1 else tuple(results)

    return batched


# The order of axes and of elements along them.


@rule(np.transpose)
def transpose(a: Any, axes: Any = None) -> Any:
    data, over = unpack_array(a)
    ndim = visible_ndim(a)
    order = (
        tuple(reversed(range(ndim))) if axes is None else normalize_axis_tuple(plain(axes), ndim)
    )
    if len(order) != ndim:
        raise NoRule
    mapped = len(over)
    return wrap(np.transpose(data, (*range(mapped), *(mapped + place for place in order))), over)


@rule(np.moveaxis)
def moveaxis(a: Any, source: Any, destination: Any) -> Any:
    data, axes = unpack_array(a)
    start, end = (shift_axes(plain(v), visible_ndim(a), len(axes)) for v in (source, destination))
    return wrap(np.moveaxis(data, start, end), axes)


@rule(np.rollaxis)
def rollaxis(a: Any, axis: int, start: int = 0) -> Any:
    data, axes = unpack_array(a)
    mapped, ndim = len(axes), visible_ndim(a)
    start = start + ndim if start < 0 else start
    if not 0 <= start <= ndim:
        raise NoRule
    return wrap(np.rollaxis(data, shift_axis(axis, ndim, mapped), start + mapped), axes)


def of_axes(function: Callable[..., Any], names: str, needs: int = 0) -> Rule:
    """The rule of a function whose parameters `names` are each an axis, a tuple of axes, or None
    for all.

    Arrays of fewer than `needs` dimensions are left to NumPy.
    """
    first = next(iter(parameters(function)))
    defaults = {name: parameters(function)[name] for name in names.split()}

    def batched(*args: Any, **kwargs: Any) -> Any:
        options = dict(zip(parameters(function), args, strict=False)) | kwargs
        data, axes = unpack_array(options.pop(first))
        mapped = len(axes)
        ndim = data.ndim - mapped
        if ndim < needs:
            raise NoRule
        options = {key: plain(value) for key, value in options.items()}
        for name, default in defaults.items():
            axis = options.get(name, default)
            alone = axis is not None and not isinstance(axis, (tuple, list))
            options[name] = (shift_axis if alone else shift_axes)(axis, ndim, mapped)
        if function is np.trace:
            data = arrange(data, mapped)
        if ndim == 0 and function is np.flip:
            data = data.copy()  # a scalar
        return wrap(function(data, **options), axes)

    return batched


def of_fixed_axes(function: Callable[..., Any], general: Callable[..., Any], *axes: int) -> Rule:
    """The rule of a function that is another one with these axes, for arrays that have them."""

    def batched(m: Any) -> Any:
        if visible_ndim(m) <= max(place if place >= 0 else -place - 1 for place in axes):
            raise NoRule
        return general(m, *axes)

    return batched


for _count in (1, 2, 3):
    rule(getattr(np, f"atleast_{_count}d"))(at_least(_count))
for _function, _names, _needs in (
    (np.swapaxes, "axis1 axis2", 0),
    (np.flip, "axis", 0),
    (np.rot90, "axes", 2),
    (np.diagonal, "axis1 axis2", 2),
    (np.trace, "axis1 axis2", 2),
):
    rule(_function)(of_axes(_function, _names, _needs))
rule(np.flipud)(of_fixed_axes(np.flipud, np.flip, 0))
rule(np.fliplr)(of_fixed_axes(np.fliplr, np.flip, 1))
rule(np.matrix_transpose)(of_fixed_axes(np.matrix_transpose, np.swapaxes, -1, -2))


@rule(np.roll)
def roll(a: Any, shift: Any, axis: Any = None) -> Any:
    data, axes = unpack_array(a)
    if axis is None:
        return reshape(roll(wrap(merge_visible(data, axes), axes), shift, 0), visible_shape(a))
    places = normalize_axis_tuple(plain(axis), visible_ndim(a), allow_duplicate=True)
    if not holds_mapped(shift):
        return wrap(np.roll(data, shift, tuple(place + len(axes) for place in places)), axes)
    several = isinstance(shift, (list, tuple)) or visible_ndim(shift) == 1
    shifts = list(shift) if several else [shift]
    pairs = np.broadcast_shapes((len(shifts),), (len(places),))[0]
    if pairs == 0:
        raise NoRule
    for number in range(pairs):
        a = _rolled(a, shifts[number % len(shifts)], places[number % len(places)])
    return a


def _rolled(array: Any, shift: Any, axis: int) -> MappedArray:
    """`array` rolled along one visible axis by a number of places, which may be mapped."""
    offsets, _ = unpack_array(shift)
    if visible_ndim(shift) or offsets.dtype.char not in "?bhilqBHIL":
        raise NoRule
    axes = common_axes([array, shift])
    data, place = lead_full(array, axes), axis + len(axes)
    offsets = lead(shift, axes).astype(np.intp)
    offsets = offsets.reshape(offsets.shape + (1,) * (data.ndim - len(axes)))
    length = data.shape[place]
    order = np.arange(length, like=data).reshape((-1,) + (1,) * (data.ndim - 1 - place))
    return wrap(np.take_along_axis(data, (order - offsets) % max(length, 1), place), axes)


@rule(np.apply_along_axis)
def apply_along_axis(func1d: Any, axis: Any, arr: Any, *args: Any, **kwargs: Any) -> Any:
    """np.apply_along_axis: one call of `func1d` for a row of all replicas."""
    data, axes = unpack_array(arr)
    place = shift_axis(plain(axis), visible_ndim(arr), 0)
    rows = np.moveaxis(data, place + len(axes), -1)
    outer = rows.shape[len(axes) : -1]
    every = (slice(None),) * len(axes)
    found = [
        func1d(wrap(rows[(*every, *where)], axes), *args, **kwargs) for where in np.ndindex(*outer)
    ]
    results = [np.stack(part) if isinstance(part, (list, tuple)) else part for part in found]
    if not results or any(
        not isinstance(part, MappedArray) or part.dtype != results[0].dtype for part in results
    ):
        raise NoRule
    stacked = np.stack(results)
    ndim = len(outer)
    grid = np.reshape(stacked, (*outer, *stacked.shape[1:]))
    last = range(ndim, grid.ndim)
    return np.transpose(grid, (*range(place), *last, *range(place, ndim)))


# Copies, and larger arrays made of smaller ones.


@rule(np.copy)
def copy(a: Any, order: Any = "K", subok: bool = False) -> Any:
    data, axes = unpack_array(a)
    return wrap(np.copy(data, order), axes)


@rule(np.meshgrid)
def meshgrid(*xi: Any, copy: Any = True, sparse: Any = False, indexing: Any = "xy") -> Any:
    options: dict[str, Any] = {"copy": copy, "sparse": sparse, "indexing": indexing}
    kind = type(np.meshgrid(*(0,) * len(xi), **options))  # a list before NumPy 2.3
    order = list(range(len(xi)))
    if indexing == "xy" and len(xi) > 1:
        order[:2] = 1, 0
    grids = []
    for place, value in zip(order, xi, strict=True):
        data, axes = unpack_array(value)
        shape = (*(1,) * place, -1, *(1,) * (len(xi) - 1 - place))
        grids.append(wrap(np.reshape(merge_visible(data, axes), sizes(axes) + shape), axes))
    found: Any = grids if sparse else broadcast_arrays(*grids)
    return kind(map(np.copy, found) if copy else found)


@rule(np.lib.stride_tricks.sliding_window_view)
def sliding_window_view(x: Any, window_shape: Any, axis: Any = None, **options: Any) -> Any:
    data, axes = unpack_array(x)
    window, axis = plain(window_shape), plain(axis)
    window = tuple(window) if np.iterable(window) else (window,)
    if axis is None and len(window) != visible_ndim(x):
        raise NoRule
    places = normalize_axis_tuple(
        range(len(window)) if axis is None else axis, visible_ndim(x), allow_duplicate=True
    )
    places = tuple(place + len(axes) for place in places)
    if on_device(data):
        return wrap(np.lib.stride_tricks.sliding_window_view(data, window, places, **options), axes)
    view = np.lib.stride_tricks.sliding_window_view(data, window, places, **options)
    base = owner(data)  # NumPy's view has another one, and would not follow its memory
    same = strided(in_order(base), data, view.shape, view.strides, address(data) - address(base))
    same.flags.writeable = view.flags.writeable
    return wrap(same, axes)


def of_bits(function: Callable[..., Any]) -> Rule:
    """The rule of packbits and unpackbits."""

    def batched(a: Any, /, axis: Any = None, *args: Any, **kwargs: Any) -> Any:
        data, axes = unpack_array(a)
        if on_device(data):
            raise NoRule  # CuPy's know no axes
        mapped, axis = len(axes), plain(axis)
        if axis is None:
            data, place = merge_visible(data, axes), mapped
        else:
            place = shift_axis(axis, visible_ndim(a), mapped)
        return wrap(function(data, place, *plain(args), **plain(kwargs)), axes)

    return batched


for _function in (np.packbits, np.unpackbits):
    rule(_function)(of_bits(_function))


@rule(np.tile)
def tile(A: Any, reps: Any) -> Any:
    axes = unpack_array(A)[1]
    counts = tuple(np.atleast_1d(plain(reps)).tolist())
    ndim = max(visible_ndim(A), len(counts))
    counts = (1,) * (ndim + len(axes) - len(counts)) + counts
    return wrap(np.tile(lead(A, axes, ndim), counts), axes)


PAIRS = {"constant_values": 0, "end_values": 0, "stat_length": 1}
"""Options of np.pad with a pair for each axis, and what they are for the mapped axes, which are
not padded."""


@rule(np.pad)
def pad(array: Any, pad_width: Any, mode: Any = "constant", **kwargs: Any) -> Any:
    data, axes = unpack_array(array)
    mapped, ndim = len(axes), visible_ndim(array)
    if callable(mode) or ndim == 0 or isinstance(pad_width, dict):
        raise NoRule
    options = {key: plain(value) for key, value in kwargs.items()}

    def for_each_axis(pairs: Any, others: int) -> list[Any]:
        return [(others, others)] * mapped + np.broadcast_to(pairs, (ndim, 2)).tolist()

    for key in PAIRS.keys() & {name for name, value in options.items() if value is not None}:
        options[key] = for_each_axis(options[key], PAIRS[key])
    if mode in ("mean", "linear_ramp"):
        data = arrange(data, mapped)
    return wrap(np.pad(data, for_each_axis(plain(pad_width), 0), mode, **options), axes)


# Diagonals and triangles.


@rule(np.diag)
def diag(v: Any, k: int = 0) -> Any:
    if visible_ndim(v) == 2:
        return np.diagonal(v, k)
    if visible_ndim(v) != 1:
        raise NoRule
    data, axes = unpack_array(v)
    k, length = operator.index(k), visible_shape(v)[0]
    extent = length + abs(k)
    result = zeros_like(data, (*sizes(axes), extent, extent))
    places = np.arange(length)
    result[..., places + max(-k, 0), places + max(k, 0)] = data
    return wrap(result, axes)


@rule(np.diagflat)
def diagflat(v: Any, k: int = 0) -> Any:
    return diag(np.ravel(v), k)


def triangle(function: Callable[..., Any]) -> Rule:
    """The rule of tril and triu; of a vector they make a matrix with it in every row."""

    def batched(m: Any, k: int = 0) -> Any:
        if visible_ndim(m) == 0:
            raise NoRule
        if visible_ndim(m) == 1:
            m = broadcast_to(m, visible_shape(m) * 2)
        data, axes = unpack_array(m)
        return wrap(function(data, plain(k)), axes)

    return batched


rule(np.tril)(triangle(np.tril))
rule(np.triu)(triangle(np.triu))


# Functions of shapes.


@rule(np.shape)
def shape(a: Any) -> Any:
    return visible_shape(a)


@rule(np.ndim)
def ndim(a: Any) -> Any:
    return visible_ndim(a)


@rule(np.size)
def size(a: Any, axis: Any = None) -> Any:
    extents = visible_shape(a)
    return math.prod(extents[place] for place in shift_axes(axis, len(extents), 0))
