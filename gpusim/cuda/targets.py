"""Formats as the kernels take them: numbers for the general rounding, and names of C++ types.
The numbers come from fallback's tables; nothing about a format is written down twice."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fallback.formats import FLOAT32, NARROW
from fallback.general import Grid

from .structs import TARGET, struct


def grid_of(dtype: np.dtype[Any]) -> Grid:
    """A dtype narrower than float64 as a Grid."""
    if dtype == FLOAT32:
        largest = float(np.finfo(np.float32).max)
        return Grid(23, -126, 2.0**-149, largest, -largest, True, True, False)
    row = NARROW[dtype]
    return Grid(
        fraction_bits=row.fraction_bits,
        min_exponent=row.min_exponent,
        smallest=2.0 ** (row.min_exponent - row.fraction_bits),
        largest=row.max_finite,
        lowest=-row.max_finite,
        has_infinity=row.has_infinity,
        has_negative_zero=row.has_negative_zero,
        narrow=True,
    )


def target(given: np.dtype[Any] | Grid) -> NDArray[Any]:
    """The struct for a Grid, or for a dtype with the codes that store it."""
    grid = given if isinstance(given, Grid) else grid_of(given)
    result = struct(
        TARGET,
        fraction_bits=grid.fraction_bits,
        min_exponent=grid.min_exponent,
        smallest=grid.smallest,
        largest=grid.largest,
        lowest=grid.lowest,
        has_infinity=grid.has_infinity,
        has_negative_zero=grid.has_negative_zero,
    )
    if not isinstance(given, Grid) and given in NARROW:
        result["bytes"] = given.itemsize
        result["nan_code"] = code(np.array(np.nan), given)
        result["infinity_code"] = code(np.array(np.inf), given)
    return result


def code(value: NDArray[Any], dtype: np.dtype[Any]) -> int:
    """The bits of a value's positive code in a dtype of up to 8 bytes."""
    bits = int(value.astype(dtype).view(f"u{dtype.itemsize}"))
    negative_nan_only = dtype in NARROW and not NARROW[dtype].has_negative_zero
    return bits if negative_nan_only else bits & ~(1 << (8 * dtype.itemsize - 1))


#: The names of dtypes in formats.cuh.
NAMES: dict[np.dtype[Any], str] = {
    np.dtype(getattr(ml_dtypes, name, name)): name
    for name in (
        *("float16", "bfloat16", "float32", "float64"),
        *("float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    )
}
