"""Indexing of tensors, by the ops that it stands for."""

from __future__ import annotations

from operator import index as as_index
from typing import Any

import numpy as np

from . import dtypes
from .tensor import Tensor, constant

__all__ = ["indexed"]


def indexed(t: Tensor, key: Any) -> Tensor:
    """`t[key]`: integers and slices, also several; integers of an array or tensor; or a mask.

    A mask, a bool tensor or array, gives `t` with zeros where it is false: shapes cannot depend on
    values.

    Raises:
        TypeError: for any other key.
        IndexError: for an integer out of range, or too many of them.
    """
    if isinstance(key, (list, np.ndarray)) and np.asarray(key).dtype.kind in "biu":
        key = constant(np.asarray(key))
    if isinstance(key, Tensor):
        return by_tensor(t, key)
    keys = key if isinstance(key, tuple) else (key,)
    if not all(isinstance(each, slice) or is_integer(each) for each in keys):
        raise TypeError(
            "Only integers, slices (`:`), integer tensors and boolean tensors are valid indices. "
            f"Not a valid Type: {type(key)}. Value: {key}."
        )
    return by_slices(t, keys)


def is_integer(value: Any) -> bool:
    """Whether it is an integer; a bool is none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def by_tensor(t: Tensor, key: Tensor) -> Tensor:
    from . import ops

    if key.dtype is dtypes.bool:
        return ops.where(key, t, constant(0, t.dtype))
    if not key.dtype.is_int:
        raise TypeError(
            "Only integers, slices (`:`), integer tensors and boolean tensors are valid indices. "
            f"Not a valid Type: {type(key)}. Value: {key}."
        )
    return ops.gather(t, key)


def by_slices(t: Tensor, keys: tuple[Any, ...]) -> Tensor:
    """Slices of one op, and without the axes that have an integer."""
    from . import ops

    if len(keys) > t.rank:
        raise IndexError(f"{len(keys)} indices are too many for {t}")
    bounds: list[tuple[int | None, int | None, int | None]] = []
    gone: list[int] = []
    for axis, key in enumerate(keys):
        if isinstance(key, slice):
            bounds.append((key.start, key.stop, key.step))
            continue
        size, place = t.shape[axis], as_index(key)
        if not -size <= place < size:
            raise IndexError(f"index {place} is out of range for axis {axis} of {t}")
        bounds.append((place % size, place % size + 1, 1))
        gone.append(axis)
    whole = all(key == slice(None) for key in keys if isinstance(key, slice)) and not gone
    if whole:
        return ops.identity(t)
    starts, stops, steps = (list(each) for each in zip(*bounds, strict=True))
    cut = ops.slice(t, starts, stops, steps, list(range(len(keys))))
    return ops.squeeze(cut, gone) if gone else cut
