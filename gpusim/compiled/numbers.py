"""Kernels of random numbers and of studies: Philox's words, normal numbers, exact sums."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.fallback import memory, quantile
from gpusim.fallback.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

from ..cuda.cache import once
from ..cuda.structs import struct
from . import build
from .build import ADDRESS, INTEGER, WORD

_RATIO = np.dtype([("above", "f8", 8), ("below", "f8", 8)])
_QUANTILE = np.dtype(
    [
        *((name, "f8") for name in ("centre", "centre_squared", "tail", "far_tail")),
        *((name, _RATIO) for name in ("central", "near", "far")),
        ("atanh", "f8", 11),
        *((name, "f8") for name in ("log2_high", "log2_low", "root_of_two")),
    ]
)
_EXACT_ROWS = np.dtype(
    [
        ("rows", "u8"),
        *((name, "i8") for name in ("count", "width", "row_stride", "source")),
        ("levels", "u8"),
        ("capacity", "i8"),
        ("special", "u8"),
    ]
)
_SOURCES = (FLOAT64, FLOAT32, FLOAT16, BFLOAT16)  # in the order of numbers.h


@once
def _library() -> Any:
    """The functions, or None if they cannot be compiled."""
    return build.functions(
        '#include "numbers.h"\n',
        _QUANTILE.itemsize + _EXACT_ROWS.itemsize,
        draw_rows=(ADDRESS, ADDRESS, *[INTEGER] * 3, *[WORD] * 3),
        normal_quantile=(ADDRESS, ADDRESS, INTEGER, ADDRESS),
        add_exactly=(ADDRESS, INTEGER, INTEGER),
    )


@once
def _constants() -> NDArray[Any]:
    """The numbers of `fallback.quantile`."""
    ratios = zip(
        ("central", "near", "far"),
        (quantile.CENTRE_RATIO, quantile.TAIL_RATIO, quantile.FAR_TAIL_RATIO),
        strict=True,
    )
    return struct(
        _QUANTILE,
        centre=quantile.CENTRE,
        centre_squared=quantile.CENTRE_SQUARED,
        tail=quantile.TAIL,
        far_tail=quantile.FAR_TAIL,
        atanh=quantile.ATANH_SERIES,
        log2_high=quantile.LOG2_HIGH,
        log2_low=quantile.LOG2_LOW,
        root_of_two=np.sqrt(2.0),
        **{name: np.array(ratio, _RATIO) for name, ratio in ratios},
    )


def draw_rows(
    rows: NDArray[np.int64], first: int, count: int, key: tuple[int, int], stream: int
) -> NDArray[np.uint64] | None:
    """Words first, first + 1, ... of each row's generator: its counter is (., row, stream, 0)."""
    library = _library()
    if library is None:
        return None
    out = memory.empty((len(rows), count), np.uint64)
    numbers = np.ascontiguousarray(rows, np.int64)
    library.draw_rows(out.ctypes.data, numbers.ctypes.data, len(rows), first, count, *key, stream)
    return out


def normal_quantile(words: NDArray[np.uint64], out: NDArray[np.float64]) -> bool:
    """`fallback.quantile.normal_quantile` of contiguous words. False: it is left to NumPy."""
    library = _library()
    if library is None:
        return False
    constants = _constants()
    library.normal_quantile(out.ctypes.data, words.ctypes.data, words.size, constants.ctypes.data)
    return True


def add_exactly(
    rows: NDArray[Any], levels: NDArray[np.float64], special: NDArray[np.float64]
) -> bool:
    """Add rows (count, width), column by column, to the exact sums of `levels` (levels, width).

    Infinities and NaNs are added to `special` instead. False: nothing is done.
    """
    library = _library()
    if library is None or rows.dtype not in _SOURCES or rows.strides[1] != rows.itemsize:
        return False
    given = struct(
        _EXACT_ROWS,
        rows=rows.ctypes.data,
        count=len(rows),
        width=rows.shape[1],
        row_stride=rows.strides[0],
        source=_SOURCES.index(rows.dtype),
        levels=levels.ctypes.data,
        capacity=len(levels),
        special=special.ctypes.data,
    )
    library.add_exactly(given.ctypes.data, 0, rows.shape[1])
    return True
