"""Reading any supported format into a block of the computing type, exactly.
NumPy's own conversions from float16 and the 8-bit formats are several times slower."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fallback import limits
from fallback.formats import FLOAT16, FLOAT32, NARROW


def decode(source: NDArray[Any], out: NDArray[Any]) -> None:
    """Write the values of `source` into `out`, of its shape; integers wrap, bool means nonzero."""
    if source.dtype == FLOAT16 and out.dtype == FLOAT32 and source.size >= limits.CAST_WIDTH:
        _decode_float16(source, out)
    elif source.dtype in NARROW and source.dtype.itemsize == 1:
        np.take(_values(source.dtype, out.dtype), source.view(np.uint8), out=out, mode="clip")
    else:
        np.copyto(out, source, casting="unsafe")


@cache
def _values(dtype: np.dtype[Any], computing: np.dtype[Any]) -> NDArray[Any]:
    """All 256 values of an 8-bit format."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(computing)


def _decode_float16(source: NDArray[Any], out: NDArray[Any]) -> None:
    """Shift the bits into place, then correct the exponent's bias by a multiplication."""
    bits = out.view(np.int32)
    np.copyto(bits, source.view(np.int16))  # the sign fills the upper half
    bits <<= 13
    bits &= -0x7000_2000  # 0x8fffe000: the sign, then exponent and fraction
    out *= np.float32(2.0**112)
    special = np.abs(out) >= np.float32(65536.0)  # infinities and NaNs look like finite numbers
    if special.any():
        out[special] = source[special]
