"""Alignment of stacked operands for batched rules: mapped axes lead, visible axes follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from ...libraries import constant_like, on_device
from ..axis_environment import Axes, axis_environment, union
from .array import Array, MappedArray, unpack


def common_axes(values: Iterable[Any]) -> Axes:
    """The axes over which `values` are mapped together, outermost first."""
    axes: Axes = ()
    for value in values:
        if isinstance(value, MappedArray):
            axes = union(axes, unpack(value)[1])
    return axes


def sizes(axes: Axes) -> tuple[int, ...]:
    """The number of replicas along each axis."""
    return tuple(entry.size for entry in axes)


def visible_ndim(value: Any) -> int:
    """The number of axes that one replica sees."""
    return value.ndim if isinstance(value, MappedArray) else np.ndim(value)


def visible_shape(value: Any) -> tuple[int, ...]:
    """The shape that one replica sees."""
    return value.shape if isinstance(value, MappedArray) else np.shape(value)


def lead(value: Any, axes: Axes, ndim: int | None = None) -> Array:
    """Data of `value` with every one of `axes` leading (size 1 where it does not vary).

    Visible axes of size 1 are put before its own to make them `ndim`. A view.
    """
    data, own = unpack(value)
    if not isinstance(value, MappedArray) and not on_device(data):
        data = np.asanyarray(data)
    pad = 0 if ndim is None else ndim - (data.ndim - len(own))
    if own == axes and pad == 0:
        return data
    index: list[Any] = [slice(None) if entry in own else None for entry in axes]
    index += [None] * pad
    return data[(*index, ...)]


def lead_full(value: Any, axes: Axes, ndim: int | None = None) -> Array:
    """As `lead`, but every axis has its full size: a broadcast, read-only view where the value
    does not vary."""
    data = lead(value, axes, ndim)
    full = (*sizes(axes), *data.shape[len(axes) :])
    return data if data.shape == full else np.broadcast_to(data, full)


def expand(data: Array, own: Axes, axes: Axes) -> Array:
    """As `lead_full`, for stacked data that its `own` axes lead."""
    if own == axes:
        return data
    data = data[(*(slice(None) if entry in own else None for entry in axes), ...)]
    return np.broadcast_to(data, (*sizes(axes), *data.shape[len(axes) :]))


def library_here() -> Any:
    """An array of the GPU's library that an enclosing map's arguments are of; None for NumPy's."""
    for entry in reversed(axis_environment()):
        if entry.like is not None:
            return entry.like
    return None


def elementwise(values: Sequence[Any]) -> tuple[list[Any], Axes]:
    """`values` ready to be broadcast against each other as NumPy does, and their common axes.

    Operands without a mapped axis stay as they are (Python scalars keep their weak dtype).
    """
    axes = common_axes(values)
    ndim = max(visible_ndim(value) for value in values)
    data = [
        lead(value, axes, ndim)
        if isinstance(value, MappedArray) and unpack(value)[1]
        else unpack(value)[0]
        for value in values
    ]
    for part in data:
        if type(part) is not np.ndarray and on_device(part):
            return [constant_like(part, other) for other in data], axes
    return data, axes


def shift_axis(axis: Any, ndim: int, mapped: int) -> int:
    """Visible axis number (negative ones too) -> axis of the stacked data; AxisError as NumPy's."""
    return normalize_axis_index(axis, ndim) + mapped


def shift_axes(axis: Any, ndim: int, mapped: int) -> tuple[int, ...]:
    """Visible axes (None: all; an int; a tuple) -> axes of the stacked data."""
    if axis is None:
        return tuple(range(mapped, mapped + ndim))
    return tuple(place + mapped for place in normalize_axis_tuple(axis, ndim))
