"""Batched rules of indexing: x[...], take, compress, choose, nonzero, and makers of index arrays.

A plain ndarray does not ask MappedArrays how to be indexed, and np.take asks only the array that
it takes from: with a mapped i, table[i] and np.take(table, i) are TypeErrors where the table is
plain, and gpusim.at(table)[i].get() is their equal. So np.eye(n)[labels] becomes
gpusim.at(np.eye(n))[labels].get(), or labels[:, None] == np.arange(n).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from ....libraries import on_device, to_library_of
from ...axis_environment import Axes
from ..align import common_axes, elementwise, lead, shift_axis, sizes, visible_ndim, visible_shape
from ..array import Array, MappedArray, is_scalar, read_only, unpack, wrap, wrap_array
from ..dispatch import INDIRECT, NoRule, rule
from ..indices import as_tuple, is_basic, nonzero, stack_basic, stack_index
from ..memory import is_writable
from ..picked import is_picked, pick, within
from .products import operand, raveled
from .ufuncs import wrap_all


@rule(operator.getitem)
def getitem(array: Any, index: Any) -> Any:
    data, axes = unpack(array)
    if is_scalar(array):
        data = data.copy()  # a scalar does not change with views of it
    entries = as_tuple(index)
    try:
        if is_basic(entries):
            part = data[stack_basic(entries, len(axes))]
            found = wrap(part, axes) if part.ndim > len(axes) else _element(part, axes, entries)
            return within(array, found) if type(array) in INDIRECT else found
        if isinstance(index, str):
            return wrap(data[index], axes)
        if isinstance(index, np.ndarray) and index.ndim and index.dtype.kind in "iu" and axes:
            return wrap(np.take(data, index, axis=len(axes)), axes)  # the same, faster
        if is_picked(entries):
            return _picked(array, entries, data, axes)
        return _found(entries, data, axes)
    except IndexError:
        raise NoRule from None  # its message counts stacked axes; the fallback's, one replica's


def _picked(array: Any, entries: tuple[Any, ...], data: Array, axes: Axes) -> Any:
    """Index with mapped integers: one element, or a view."""
    found = _found(entries, data, axes)
    if found.ndim == 0:
        return found
    if is_writable(data) or type(array) in INDIRECT:
        return pick(array, entries)
    return wrap(read_only(unpack(found)[0]), found._axes)


def _element(part: Array, axes: Axes, entries: tuple[Any, ...]) -> Any:
    """One element: with an Ellipsis a 0-d array, which is a view of an array, else a scalar."""
    if Ellipsis in entries:
        return wrap_array(part, axes)
    return wrap(part.copy(), axes)


def _found(entries: tuple[Any, ...], data: Array, axes: Axes) -> Any:
    place = stack_index(entries, data, axes)
    return wrap(place.arrange(data[place.stacked]), place.axes)


IN_RANGE: dict[str, Callable[[Array, int], Array]] = {
    "raise": lambda places, size: places,
    "wrap": lambda places, size: places % size,
    "clip": lambda places, size: np.clip(places, 0, size - 1),
}
"""The indices that np.take reads in each of its modes."""


@rule(np.take)
def take(a: Any, indices: Any, axis: Any = None, mode: Any = "raise") -> Any:
    array = raveled(a) if axis is None else operand(a)
    places, varying = unpack(operand(indices))
    data, axes = unpack(array)
    if mode not in IN_RANGE or isinstance(axis, MappedArray) or places.dtype.kind not in "biu":
        raise NoRule
    try:
        visible = 0 if axis is None else axis
        along = shift_axis(visible, visible_ndim(array), len(axes))
        if not varying and not on_device(data):
            return wrap(np.take(data, places, axis=along, mode=mode), axes)
        if not varying:  # CuPy's np.take has no modes
            return wrap(np.take(data, IN_RANGE[mode](places, data.shape[along]), along), axes)
        if data.shape[along] == 0:
            raise NoRule
        inside = wrap(IN_RANGE[mode](places.astype(np.intp), data.shape[along]), varying)
        found = _found((slice(None),) * (along - len(axes)) + (inside,), data, axes)
        return found.copy()  # in C order, as np.take's result
    except IndexError:  # AxisError is one too
        raise NoRule from None


@rule(np.take_along_axis)
def take_along_axis(arr: Any, indices: Any, axis: Any = -1) -> Any:
    array = raveled(arr) if axis is None else operand(arr)
    places = operand(indices)
    ndim = visible_ndim(array)
    if visible_ndim(places) != ndim or isinstance(axis, MappedArray):
        raise NoRule
    axes = common_axes((array, places))
    try:
        along = shift_axis(0 if axis is None else axis, ndim, len(axes))
        return wrap(np.take_along_axis(lead(array, axes), lead(places, axes), along), axes)
    except IndexError:
        raise NoRule from None


@rule(np.compress)
def compress(condition: Any, a: Any, axis: Any = None) -> Any:
    chosen = operand(condition)
    if visible_ndim(chosen) != 1:
        raise NoRule
    return take(a, nonzero(chosen)[0], axis)


@rule(np.extract)
def extract(condition: Any, arr: Any) -> Any:
    return take(arr, nonzero(raveled(condition))[0])


@rule(np.choose)
def choose(a: Any, choices: Any, mode: Any = "raise") -> Any:
    (where, *arrays), axes = elementwise([operand(a), *choices])
    table: Any = arrays
    if on_device(where):
        table = np.stack(np.broadcast_arrays(*[to_library_of(where, part) for part in arrays]))
    try:
        return wrap(np.choose(where, table, mode=mode), axes)
    except ValueError:
        raise NoRule from None


@rule(np.nonzero)
def nonzero_places(a: Any) -> Any:
    if visible_ndim(a) == 0:
        raise NoRule
    return tuple(_wrapped(places) for places in nonzero(a))


@rule(np.flatnonzero)
def flatnonzero(a: Any) -> Any:
    return _wrapped(nonzero(raveled(a))[0])


@rule(np.argwhere)
def argwhere(a: Any) -> Any:
    places, axes = zip(*(unpack(found) for found in nonzero_places(a)), strict=True)
    return wrap(np.stack(places, axis=-1), axes[0])


def _wrapped(value: Any) -> MappedArray:
    return value if isinstance(value, MappedArray) else wrap(value, ())


@rule(np.ix_)
def ix_(*args: Any) -> Any:
    arrays = [_ix_places(arg) for arg in args]
    ndim = len(arrays)
    result = []
    for position, array in enumerate(arrays):
        data, axes = unpack(array)
        shape = [1] * ndim
        shape[position] = data.shape[-1]
        result.append(wrap(data.reshape((*sizes(axes), *shape)), axes))
    return tuple(result)


def _ix_places(arg: Any) -> Any:
    """The indices that one argument of np.ix_ selects along its axis."""
    places = operand(arg)
    if visible_ndim(places) != 1:
        raise NoRule
    if places.dtype == np.bool_:
        return nonzero(places)[0]
    return places.astype(np.intp) if arg is not places and places.size == 0 else places


@rule(np.unravel_index)
def unravel_index(indices: Any, shape: Any, order: Any = "C") -> Any:
    places, axes = unpack(indices)
    return wrap_all(np.unravel_index(places, shape, order=order), axes)


@rule(np.ravel_multi_index)
def ravel_multi_index(multi_index: Any, dims: Any, mode: Any = "raise", order: Any = "C") -> Any:
    places, axes = elementwise([operand(places) for places in multi_index])
    return wrap(np.ravel_multi_index(tuple(places), dims, mode=mode, order=order), axes)


@rule(np.diag_indices_from)
def diag_indices_from(arr: Any) -> Any:
    return wrap_all(np.diag_indices_from(_any_of_shape(arr)), ())


@rule(np.tril_indices_from)
def tril_indices_from(arr: Any, k: int = 0) -> Any:
    return wrap_all(np.tril_indices_from(_any_of_shape(arr), operator.index(k)), ())


@rule(np.triu_indices_from)
def triu_indices_from(arr: Any, k: int = 0) -> Any:
    return wrap_all(np.triu_indices_from(_any_of_shape(arr), operator.index(k)), ())


def _any_of_shape(value: Any) -> Array:
    """An array of one replica's shape, without memory of its own."""
    data, axes = unpack(value)
    if on_device(data):
        return data[(0,) * len(axes)]
    return np.broadcast_to(np.int8(0), visible_shape(value))
