"""Axis names as collectives take them: a name, a tuple of names, or axes of the array itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .axis_environment import AxisEntry, AxisName, lockstep_axes, resolve
from .mapped_array.align import library_here
from .mapped_array.array import MappedArray, wrap


def split_names(axis_name: AxisName) -> tuple[AxisName, ...]:
    """The axis names as a tuple: one name, or a tuple or list of names (and positional axes)."""
    if isinstance(axis_name, str):
        return (axis_name,)
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ValueError(
                f"axis_name {axis_name!r} names {name!r} twice; each axis may come once"
            )
    return names


def is_positional(name: AxisName) -> bool:
    """Whether a collective's axis name stands for an axis of the array itself."""
    return isinstance(name, (int, np.integer)) and not isinstance(name, bool)


def refuse_positional(what: str, axis_name: AxisName) -> AxisName:
    """ValueError for integers among the axis names."""
    if any(is_positional(name) for name in split_names(axis_name)):
        raise ValueError(f"{what} works over named axes only, but axis_name is {axis_name!r}")
    return axis_name


def resolve_names(axis_name: AxisName) -> list[AxisEntry]:
    """The axes of one axis name or a tuple of names, in the tuple's order; NameError if unbound."""
    return [resolve(name) for name in split_names(axis_name)]


def axis_size(axis_name: AxisName) -> int:
    """The number of replicas along an axis, or along a tuple of axes, as a Python int.

    **Raises**: NameError for an axis that is not bound.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> gpusim.vmap(lambda x: x / lax.axis_size("i"), axis_name="i")(np.array([1.0, 2.0]))
    array([0.5, 1. ])
    """
    refuse_positional("axis_size", axis_name)
    return math.prod(entry.total for entry in resolve_names(axis_name))


def axis_index(axis_name: AxisName) -> Any:
    """The replica's own index (int32) along an axis, or row-major along a tuple of axes.

    **Raises**: NameError for an axis that is not bound.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> gpusim.vmap(lambda x: x + lax.axis_index("i"), axis_name="i")(np.array([10, 10, 10]))
    array([10, 11, 12])
    """
    refuse_positional("axis_index", axis_name)
    entries = resolve_names(axis_name)
    here = library_here()
    index: Any = np.zeros((), np.int32)
    for entry in entries:
        first, end = entry.offset, entry.offset + entry.size
        own: Any = (
            wrap(np.arange(first, end, dtype=np.int32, like=here), (entry,))
            if entry.index is None
            else np.asarray(entry.offset + entry.index, np.int32)
        )
        index = own if len(entries) == 1 else index * np.int32(entry.total) + own
    if lockstep_axes() and not isinstance(index, MappedArray):
        return wrap(np.asarray(index), ())
    return index if isinstance(index, MappedArray) else np.int32(index)
