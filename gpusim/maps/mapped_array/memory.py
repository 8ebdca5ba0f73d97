"""Memory that stacked arrays share: views of it, and its growth along mapped axes.

A MappedArray's views are views of its stacked data, so writes are shared as NumPy shares them. An
array that does not vary along a mapped axis has no room for values that do. When such values are
written into it, `vary` moves its memory into one copy for each replica, and every MappedArray that
views the old memory follows at its next use (`follow`).
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, NamedTuple

import numpy as np

from ...libraries import as_bits, on_device, owner
from ..axis_environment import Axes, axis_environment, union

Array = Any


class Move(NamedTuple):
    """Where the memory of an array went.

    **Attributes**:

    - `source`: the array that owned the memory.
    - `stack`: the copies of its memory, the new axes leading.
    - `axes`: the new axes.
    """

    source: weakref.ref[Any]
    stack: Array
    axes: Axes


moves: dict[int, Move] = {}
"""By the id of the old owner, which MappedArrays that have not followed yet keep alive."""


_writes = 0


def count_write() -> None:
    """Count a write into MappedArrays."""
    global _writes
    _writes += 1


def writes_so_far() -> int:
    """The number of writes so far: views that hold copies are up to date while it stays."""
    return _writes


def address(data: Array) -> int:
    """The address of the first element."""
    if on_device(data):
        return int(data.__cuda_array_interface__["data"][0])
    return int(data.__array_interface__["data"][0])


def strided(memory: Array, dtype: np.dtype[Any], shape: Any, strides: Any, offset: int) -> Array:
    """A view of contiguous `memory` that begins `offset` bytes into it, with the given dtype.

    **Raises**:

    - TypeError: for arrays of objects, whose memory NumPy does not view.
    """
    if dtype.hasobject:
        raise TypeError(
            "views of arrays of objects cannot follow their memory: take copies of them"
        )
    if on_device(memory):
        flat = as_bits(memory).reshape(-1).view(np.uint8)[offset:].view(dtype)
        tricks = sys.modules["cupy"].lib.stride_tricks
        return tricks.as_strided(flat, shape, strides)
    view: Array = np.ndarray(shape, dtype, memory.view(np.uint8), offset, strides)
    return view


def in_order(base: Array) -> Array:
    """The array that owns memory, its axes in the order in which they lie there.

    **Raises**:

    - TypeError: if there are gaps between its elements.
    """
    if base.flags.c_contiguous:
        return base
    turned = base.transpose(sorted(range(base.ndim), key=lambda axis: -base.strides[axis]))
    if not turned.flags.c_contiguous:
        raise TypeError("an array with gaps in its memory cannot become mapped: take a copy of it")
    return turned


def vary(mapped: Any, axes: Axes) -> None:
    """Give the memory of a MappedArray a copy for each replica along `axes`."""
    data = mapped._data
    added = tuple(entry for entry in axes if entry not in mapped._axes)
    base = owner(data)
    turned = in_order(base)
    shape = (*(entry.size for entry in added), *turned.shape)
    stack = np.empty_like(as_bits(turned), shape=shape, order="C")
    stack[...] = as_bits(turned)
    stack = stack.view(turned.dtype)
    if data is base and base.flags.c_contiguous and not mapped._axes:
        mapped._data, mapped._axes = stack, added  # the common case needs no strides
    key = id(base)
    moves[key] = Move(weakref.ref(base, lambda _: moves.pop(key, None)), stack, added)
    if mapped._data is data:
        follow(mapped)


def follow(mapped: Any) -> None:
    """Let a MappedArray view the memory to which that of its data has moved, if it has."""
    while True:
        data, axes = mapped._data, mapped._axes
        if isinstance(data, np.generic):
            return
        base = owner(data)
        move = moves.get(id(base))
        if move is None or move.source() is not base:
            return
        every = union(axes, move.axes)
        steps = dict(zip(axes, data.strides, strict=False))
        steps |= dict(zip(move.axes, move.stack.strides, strict=False))
        shape = (*(entry.size for entry in every), *data.shape[len(axes) :])
        strides = (*(steps[entry] for entry in every), *data.strides[len(axes) :])
        if data.size:
            moved = strided(move.stack, data.dtype, shape, strides, address(data) - address(base))
        else:
            moved = np.empty_like(as_bits(data), shape=shape).view(data.dtype)
        if isinstance(data, np.ndarray):
            moved.flags.writeable = data.flags.writeable
        mapped._data, mapped._axes = moved, every


def is_writable(data: Array) -> bool:
    """Whether data may be written: it belongs to no argument of a map, and has no stride of 0."""
    if isinstance(data, np.ndarray):
        return data.flags.writeable
    if isinstance(data, np.generic):
        return False
    return not _is_argument(owner(data)) and not any(
        step == 0 < extent - 1 for step, extent in zip(data.strides, data.shape, strict=True)
    )


def _is_argument(base: Array) -> bool:
    """Whether an array on a GPU, which has no flag that says so, is an argument of a map."""
    return any(id(base) in entry.read_only for entry in axis_environment())
