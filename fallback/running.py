"""Adding rows one after the other, in order, by one call of a ufunc.
NumPy's reduce does so along the first of two axes if the second is contiguous: that is checked."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fallback.formats import kind_of

_PROBED_WIDTH = 64  # wider rows than this are reduced as those of this width


def rows_of(blocks: NDArray[Any] | list[NDArray[Any]]) -> NDArray[Any] | None:
    """Blocks as rows (n, elements) that `reduce_rows` can take without a copy, if they are such."""
    if not isinstance(blocks, np.ndarray) or not blocks.flags.aligned:
        return None
    if not blocks[0].flags.c_contiguous:
        return None
    rows = blocks.reshape(len(blocks), -1)
    return rows if abs(rows.strides[0]) >= rows.shape[1] * rows.itemsize else None


def reduce_rows(ufunc: np.ufunc, rows: NDArray[Any], out: NDArray[Any]) -> None:
    """out = ((rows[0] op rows[1]) op rows[2]) op ..., each result rounded to the dtype of all.

    `rows` are two-dimensional, each contiguous.
    """
    width = min(rows.shape[1], _PROBED_WIDTH)
    if _goes_row_by_row(ufunc, rows.dtype, width, rows.strides[0] < 0):
        _reduce(ufunc, rows, out)
    else:  # sequential by definition, and slow: it goes down column after column
        out[...] = ufunc.accumulate(rows, axis=0, dtype=rows.dtype)[-1]


def _reduce(ufunc: np.ufunc, rows: NDArray[Any], out: NDArray[Any]) -> None:
    """NumPy starts from `initial`: for sums -0 is the number that changes no other."""
    floating = kind_of(rows.dtype) == "float"
    neutral = (-0.0 if floating else 0) if ufunc is np.add else 1
    ufunc.reduce(rows, axis=0, dtype=rows.dtype, out=out, initial=rows.dtype.type(neutral))


@cache
def _goes_row_by_row(ufunc: np.ufunc, dtype: np.dtype[Any], width: int, backwards: bool) -> bool:
    """Whether this NumPy reduces rows of this width in order; a single column it adds pairwise.

    Tried on as many rows as make it plain: one column in ten is the same in either order.
    """
    return width > 1 and all(
        _went_row_by_row(ufunc, _probe(ufunc, dtype, width, trial, backwards))
        for trial in range(-(-_PROBED_WIDTH // width))
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
    _reduce(ufunc, rows, found)
    for row in rows[1:]:
        ufunc(expected, row, out=expected)
    return np.array_equal(found, expected)
