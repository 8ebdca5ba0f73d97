"""Formats as the kernels take them: numbers for the general rounding, and names of C++ types.
The numbers come from fallback's tables; nothing about a format is written down twice."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gpusim.fallback.formats import FLOAT32, FLOAT32_INFO, SUB_32_BIT, FormatInfo, NumberFormat

from .structs import TARGET, struct


def info_of(given: NumberFormat) -> FormatInfo:
    """The FormatInfo of a dtype of at most 32 bits, or the given one."""
    if isinstance(given, FormatInfo):
        return given
    return FLOAT32_INFO if given == FLOAT32 else SUB_32_BIT[given]


def target(given: NumberFormat) -> NDArray[Any]:
    """The struct for a FormatInfo, or for a dtype with the codes that store it."""
    info = info_of(given)
    result = struct(
        TARGET,
        fraction_bits=info.fraction_bits,
        min_exponent=info.min_exponent,
        smallest=info.smallest,
        largest=info.largest,
        lowest=info.lowest,
        has_infinity=info.has_infinity,
        has_negative_zero=info.has_negative_zero,
    )
    if not isinstance(given, FormatInfo) and given in SUB_32_BIT:
        result["bytes"] = given.itemsize
        result["nan_code"] = code(np.array(np.nan), given)
        result["infinity_code"] = code(np.array(np.inf), given)
    return result


def code(value: NDArray[Any], dtype: np.dtype[Any]) -> int:
    """The bits of a value's positive code in a dtype of up to 8 bytes."""
    bits = int(value.astype(dtype).view(f"u{dtype.itemsize}"))
    negative_nan_only = dtype in SUB_32_BIT and not SUB_32_BIT[dtype].has_negative_zero
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
