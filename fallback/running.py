"""Adding rows one after the other, in order, by one call of a ufunc.
NumPy's reduce does so along the first of two axes if the second is contiguous: that is checked."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formats import kind_of

Reducer = Callable[..., NDArray[Any]]  # (rows, out=None) -> out

PROBED_WIDTH = 64  # wider rows than this are reduced as those of this width


def reduce_rows(ufunc: np.ufunc, blocks: NDArray[Any], out: NDArray[Any]) -> bool:
    """out = ((blocks[0] op blocks[1]) op blocks[2]) op ..., each result rounded to their dtype.

    `out` is C-contiguous. False, and nothing done, if the blocks are not contiguous rows.
    """
    flags = blocks.flags
    if not flags.aligned or not (flags.c_contiguous or blocks[0].flags.c_contiguous):
        return False
    rows = blocks if blocks.ndim == 2 else blocks.reshape(len(blocks), -1)
    stride, width, dtype = rows.strides[0], rows.shape[1], rows.dtype
    if abs(stride) < width * dtype.itemsize:
        return False
    reduce = reducer(ufunc, dtype, min(width, PROBED_WIDTH), stride < 0)
    reduce(rows, out=out if out.ndim == 1 else out.reshape(-1))
    return True


@cache
def reducer(ufunc: np.ufunc, dtype: np.dtype[Any], width: int, backwards: bool) -> Reducer:
    """The reduction of contiguous rows (R, width) to (width,), into `out` or a new array.

    `width` may be `PROBED_WIDTH` for wider rows. `backwards`: each row lies in front of the last.
    """
    if _goes_row_by_row(ufunc, dtype, width, backwards):
        return partial(ufunc.reduce, axis=0, dtype=dtype, initial=_neutral(ufunc, dtype))

    def accumulate(rows: NDArray[Any], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Sequential by definition, and slow: it goes down column after column."""
        out = np.empty(rows.shape[1:], dtype) if out is None else out
        out[...] = ufunc.accumulate(rows, axis=0, dtype=dtype)[-1]
        return out

    return accumulate


@cache
def _neutral(ufunc: np.ufunc, dtype: np.dtype[Any]) -> np.generic:
    """The number that changes no other: NumPy starts from it. For sums of floats that is -0."""
    floating = kind_of(dtype) == "float"
    neutral: np.generic = dtype.type((-0.0 if floating else 0) if ufunc is np.add else 1)
    return neutral


@cache
def _goes_row_by_row(ufunc: np.ufunc, dtype: np.dtype[Any], width: int, backwards: bool) -> bool:
    """Whether this NumPy reduces rows of this width in order; a single column it adds pairwise.

    Tried on as many rows as make it plain: one column in ten is the same in either order.
    """
    return width > 1 and all(
        _went_row_by_row(ufunc, _probe(ufunc, dtype, width, trial, backwards))
        for trial in range(-(-PROBED_WIDTH // width))
    )


def _probe(
    ufunc: np.ufunc, dtype: np.dtype[Any], width: int, trial: int, backwards: bool
) -> NDArray[Any]:
    number = np.arange(33 * width, dtype=np.int64).reshape(33, width) + 33 * width * trial
    mixed = number * 40503 % 1009 - 504
    near_one = ufunc is np.multiply  # products neither grow nor vanish
    values = 1 + mixed / 4096 if near_one else mixed / 3.0 * 2.0 ** (number % 7 - 3)
    return values.astype(dtype)[:: -1 if backwards else 1]


def _went_row_by_row(ufunc: np.ufunc, rows: NDArray[Any]) -> bool:
    found, expected = np.empty_like(rows[0]), rows[0].copy()
    neutral = _neutral(ufunc, rows.dtype)
    ufunc.reduce(rows, axis=0, dtype=rows.dtype, out=found, initial=neutral)
    for row in rows[1:]:
        ufunc(expected, row, out=expected)
    return np.array_equal(found, expected)
