"""The number formats that folds read, compute in, round to and write.
Formats are data: everything that rounding has to know about one is a row of a table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)


@dataclass(frozen=True)
class FormatInfo:
    """A binary floating-point format, as far as rounding to it is concerned.

    - In the binade of 2**e the ulp is 2**(e - `fraction_bits`): the hidden bit is not counted.
    - `min_exponent` is the exponent of the smallest normal number. Below it the ulp stays what it
      is there, down to zero. A format without subnormals has only zero below `smallest`.
    - `largest` and `lowest` are the extreme finite values; `lowest` is 0 in an unsigned format.
    - `has_infinity`, `has_negative_zero`: whether a code stands for it.
    - `sub_32_bit`: whether a value has fewer bits than float32. Only then rounding may be
      stochastic.
    - `dtype`: the dtype that stores the values, if there is one.
    """

    fraction_bits: int
    min_exponent: int
    smallest: float
    largest: float
    lowest: float
    has_infinity: bool
    has_negative_zero: bool
    sub_32_bit: bool
    dtype: np.dtype[Any] | None = field(default=None, compare=False)

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest finite number."""
        return math.frexp(self.largest)[1] - 1

    @property
    def min_ulp(self) -> int:
        """The exponent of the smallest ulp: all values are multiples of 2 to this power."""
        return self.min_exponent - self.fraction_bits

    @property
    def overflow(self) -> float:
        """The result for a magnitude beyond the largest finite one."""
        return math.inf if self.has_infinity else math.nan

    @property
    def carrier(self) -> np.dtype[Any]:
        """float32 if it holds every value exactly, else float64."""
        single = np.finfo(FLOAT32)
        fits = (
            self.fraction_bits <= single.nmant
            and self.min_ulp >= single.minexp - single.nmant
            and max(self.largest, -self.lowest) <= float(single.max)
        )
        return FLOAT32 if fits else FLOAT64


def _info(
    dtype: Any,
    fraction_bits: int,
    min_exponent: int,
    largest: float,
    has_infinity: bool = True,
    has_negative_zero: bool = True,
) -> FormatInfo:
    kind = np.dtype(dtype)
    smallest = 2.0 ** (min_exponent - fraction_bits)
    special = has_infinity, has_negative_zero
    below = kind.itemsize < 4
    return FormatInfo(
        fraction_bits, min_exponent, smallest, largest, -largest, *special, below, kind
    )


#: The formats of fewer bits than float32 that have a dtype.
SUB_32_BIT: dict[np.dtype[Any], FormatInfo] = {
    np.dtype(row.dtype): row
    for row in (
        _info(FLOAT16, 10, -14, 65504.0),
        _info(BFLOAT16, 7, -126, float.fromhex("0x1.fep127")),
        _info(ml_dtypes.float8_e5m2, 2, -14, 57344.0),
        _info(ml_dtypes.float8_e4m3fn, 3, -6, 448.0, has_infinity=False),
        _info(ml_dtypes.float8_e5m2fnuz, 2, -15, 57344.0, False, False),
        _info(ml_dtypes.float8_e4m3fnuz, 3, -7, 240.0, False, False),
    )
}
FLOAT32_INFO = _info(FLOAT32, 23, -126, float(np.finfo(np.float32).max))

#: A format that has a dtype, or any other one.
NumberFormat = np.dtype[Any] | FormatInfo


def is_sub_32_bit(given: NumberFormat) -> bool:
    """Whether rounding to this format may be stochastic."""
    return given.sub_32_bit if isinstance(given, FormatInfo) else given in SUB_32_BIT


#: The kind of each dtype that folds take.
KINDS: dict[np.dtype[Any], str] = {
    np.dtype(np.bool_): "bool",
    **{np.dtype(f"{sign}int{bits}"): "int" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **dict.fromkeys((*SUB_32_BIT, FLOAT32, FLOAT64), "float"),
    np.dtype(np.complex64): "complex",
    np.dtype(np.complex128): "complex",
}


def kind_of(dtype: np.dtype[Any]) -> str:
    """Return "bool", "int", "float" or "complex"; TypeError for an unsupported dtype."""
    kind = KINDS.get(dtype)
    if kind is None:
        names = ", ".join(known.name for known in KINDS)
        raise TypeError(f"dtype {dtype} is not supported; expected one of {names}")
    return kind


def check_float(name: str, dtype: np.dtype[Any], more: str = "") -> None:
    """TypeError for a dtype that is not a floating-point one; `more` are other choices."""
    if KINDS.get(dtype) != "float":
        known = ", ".join(each.name for each, kind in KINDS.items() if kind == "float")
        raise TypeError(f"{name}: {dtype} given, expected a floating-point dtype ({known}){more}")


def real_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of a complex dtype's two parts; a real dtype itself."""
    if dtype.kind == "c":
        return FLOAT32 if dtype.itemsize == 8 else FLOAT64
    return dtype


def default_accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The accumulator that `accumulate=None` stands for, by the array's dtype."""
    if dtype == BFLOAT16:
        return FLOAT32
    return FLOAT16 if dtype in SUB_32_BIT else dtype


def computing_dtype(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which every addition is done: float64 if one of `dtypes` is, else float32."""
    return FLOAT64 if FLOAT64 in dtypes else FLOAT32
