"""Helpers for the rules of ops on stacked arrays: axis 0 is the replicas, other axes follow it.

Reductions run over one trailing axis, so that a replica's bits do not depend on their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from .._definition import Array, Arrays

Shape = tuple[int, ...]

_FLOAT16 = np.dtype(np.float16)
_FLOAT32 = np.dtype(np.float32)


def wide(x: Array) -> Array:
    """The array in the dtype for arithmetic of several steps: float32 for float16."""
    return x.astype(_FLOAT32) if x.dtype == _FLOAT16 else x


def narrow(x: Array, dtype: Any) -> Array:
    """The array in the dtype of a result; not copied if it has that dtype."""
    return x if x.dtype == dtype else x.astype(dtype)


def even(xp: ModuleType, x: Array) -> Array:
    """The array in C order: the bits of NumPy's exp, sin and others depend on the layout."""
    return x if x.flags.c_contiguous else xp.ascontiguousarray(x)


def raise_rank(x: Array, rank: int) -> Array:
    """Insert axes of length 1 after the replicas, so that [R, *shape] has a rank of `rank` there.

    >>> raise_rank(np.zeros((4, 3)), 2).shape
    (4, 1, 3)
    """
    missing = rank + 1 - x.ndim
    return x if missing <= 0 else x.reshape(x.shape[0], *(1,) * missing, *x.shape[1:])


def align(*arrays: Array) -> Arrays:
    """The arrays reshaped so that they broadcast against each other, replica by replica."""
    rank = max(x.ndim for x in arrays) - 1
    return [raise_rank(x, rank) for x in arrays]


def broadcast_to(xp: ModuleType, x: Array, shape: Shape) -> Array:
    """[R, *smaller] as [R, *shape], a view."""
    return xp.broadcast_to(raise_rank(x, len(shape)), (x.shape[0], *shape))


@lru_cache(maxsize=1024)
def normal_axes(axes: int | tuple[int, ...] | None, rank: int) -> tuple[int, ...]:
    """Axes as a sorted tuple of numbers from 0; None means all axes.

    >>> normal_axes(-1, 3), normal_axes(None, 2), normal_axes((1, -3), 3)
    ((2,), (0, 1), (0, 1))
    """
    if axes is None:
        return tuple(range(rank))
    out = set()
    for axis in (axes,) if isinstance(axes, int) else axes:
        if not -rank <= axis < rank:
            raise ValueError(f"axis {axis} is out of range for a tensor of rank {rank}")
        out.add(axis % rank)
    return tuple(sorted(out))


@lru_cache(maxsize=1024)
def reduced_shape(shape: Shape, axes: tuple[int, ...], keepdims: bool) -> Shape:
    """The shape after a reduction over (normal) axes."""
    if keepdims:
        return tuple(1 if i in axes else n for i, n in enumerate(shape))
    return tuple(n for i, n in enumerate(shape) if i not in axes)


@lru_cache(maxsize=1024)
def _trailing(shape: Shape, axes: tuple[int, ...]) -> tuple[tuple[int, ...] | None, Shape]:
    """The transposition of [R, *shape] that puts axes last (None: no change), and [*others, n]."""
    others = [i for i in range(len(shape)) if i not in axes]
    order = (*others, *axes)
    rows = (*(shape[i] for i in others), math.prod(shape[i] for i in axes))
    if order == tuple(range(len(shape))):
        return None, rows
    return (0, *(i + 1 for i in order)), rows


def flatten_axes(xp: ModuleType, x: Array, axes: Iterable[int]) -> Array:
    """[R, *others, n]: the axes moved behind the others and merged into one, in C order."""
    order, rows = _trailing(x.shape[1:], tuple(axes))
    if order is not None:
        x = x.transpose(order)
    return even(xp, x).reshape(x.shape[0], *rows)


def total(xp: ModuleType, x: Array, axes: Sequence[int], keepdims: bool = False) -> Array:
    """The sum over axes; float16 is added in float32 and rounded once, integers wrap."""
    if not axes:
        return x
    summed = add_up(xp, flatten_axes(xp, wide(x), axes))
    shape = reduced_shape(x.shape[1:], tuple(axes), keepdims)
    return narrow(summed, x.dtype).reshape(x.shape[0], *shape)


def add_up(xp: ModuleType, rows: Array) -> Array:
    """The sum over the last axis, in the rows' own type."""
    return xp.add.reduce(rows, axis=-1, dtype=rows.dtype)


def unbroadcast(xp: ModuleType, gradient: Array, shape: Shape) -> Array:
    """The gradient of a value that was broadcast from `shape`: the sum over its copies."""
    whole = gradient.shape[1:]
    if whole == shape:
        return gradient
    padded = (1,) * (len(whole) - len(shape)) + tuple(shape)
    axes = tuple(i for i, (n, m) in enumerate(zip(whole, padded, strict=True)) if n != m)
    return total(xp, gradient, axes, keepdims=True).reshape(gradient.shape[0], *shape)
