"""The number formats that folds read, compute in, round to and write.
Formats are data: everything that rounding has to know about one is a row of a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)


@dataclass(frozen=True)
class Format:
    """A binary floating-point format narrower than float32.

    `fraction_bits` do not count the hidden bit; `min_exponent` is the exponent of the smallest
    normal number, `max_exponent` that of the largest finite one, `max_finite`.
    """

    dtype: np.dtype[Any]
    fraction_bits: int
    min_exponent: int
    max_exponent: int
    max_finite: float
    has_infinity: bool = True
    has_negative_zero: bool = True

    @property
    def overflow(self) -> float:
        """What a magnitude beyond the largest finite one becomes."""
        return math.inf if self.has_infinity else math.nan


NARROW: dict[np.dtype[Any], Format] = {
    row.dtype: row
    for row in (
        Format(FLOAT16, 10, -14, 15, 65504.0),
        Format(BFLOAT16, 7, -126, 127, float.fromhex("0x1.fep127")),
        Format(np.dtype(ml_dtypes.float8_e5m2), 2, -14, 15, 57344.0),
        Format(np.dtype(ml_dtypes.float8_e4m3fn), 3, -6, 8, 448.0, has_infinity=False),
        Format(np.dtype(ml_dtypes.float8_e5m2fnuz), 2, -15, 15, 57344.0, False, False),
        Format(np.dtype(ml_dtypes.float8_e4m3fnuz), 3, -7, 7, 240.0, False, False),
    )
}

_KINDS: dict[np.dtype[Any], str] = {
    np.dtype(np.bool_): "bool",
    **{np.dtype(f"{sign}int{bits}"): "int" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **dict.fromkeys((*NARROW, FLOAT32, FLOAT64), "float"),
    np.dtype(np.complex64): "complex",
    np.dtype(np.complex128): "complex",
}


def kind_of(dtype: np.dtype[Any]) -> str:
    """Return "bool", "int", "float" or "complex"; TypeError for a dtype that folds do not know."""
    kind = _KINDS.get(dtype)
    if kind is None:
        names = ", ".join(known.name for known in _KINDS)
        raise TypeError(f"dtype {dtype} is not supported; expected one of {names}")
    return kind


def real_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of a complex dtype's two parts; a real dtype itself."""
    if dtype.kind == "c":
        return FLOAT32 if dtype.itemsize == 8 else FLOAT64
    return dtype


def default_accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The accumulator that `accumulate=None` stands for, by the array's dtype."""
    if dtype == BFLOAT16:
        return FLOAT32
    return FLOAT16 if dtype in NARROW else dtype


def computing_dtype(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which every addition is done: float64 if one of `dtypes` is, else float32."""
    return FLOAT64 if FLOAT64 in dtypes else FLOAT32
