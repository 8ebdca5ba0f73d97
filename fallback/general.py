"""Rounding to any binary format: slower than the code paths for dtypes, to the same contract.
Values are held in float32 if it holds all values of the format, else in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formats import FormatInfo
from .workspace import Workspace


class FormatRounder:
    """Rounds blocks of float32 or float64 to any format, as a `fallback.rounding.Rounder`."""

    exact = False

    def __init__(self, info: FormatInfo, stochastic: bool) -> None:
        self._info = info
        self.stochastic = stochastic and info.sub_32_bit

    def __call__(
        self,
        block: NDArray[Any],
        lanes: NDArray[np.uint32] | None,
        workspace: Workspace,
        bound: float = math.inf,
    ) -> float:
        """Round `block` in place; its dtype holds all values of the info.

        `lanes` broadcasts against it. None, or a format of 32 bits or more: to nearest.
        """
        block[...] = rounded(block, self._info, lanes if self.stochastic else None)
        return math.inf


def rounded(
    block: NDArray[Any], info: FormatInfo, lanes: NDArray[np.uint32] | None
) -> NDArray[np.float64]:
    """The values of `block` in one rounding to a format. All arithmetic here is exact."""
    magnitudes = np.abs(block).astype(np.float64)
    exponents = np.frexp(magnitudes)[1] - 1
    np.maximum(exponents, info.min_exponent, out=exponents)
    units = np.ldexp(magnitudes, info.fraction_bits - exponents)
    if lanes is None:
        whole = _nearest(units, exponents, info)
    else:
        whole = np.floor(units)
        whole += lanes < np.floor((units - whole) * 2.0**32)
    result = np.ldexp(whole, exponents - info.fraction_bits)
    if info.smallest > 2.0**info.min_ulp:
        _skip_subnormals(magnitudes, result, info.smallest, lanes)
    np.copysign(result, block, out=result)
    if not info.has_negative_zero:
        result += 0.0
    _overflow(result, info)
    return result


def _nearest(units: NDArray[Any], exponents: NDArray[Any], info: FormatInfo) -> NDArray[np.float64]:
    """The whole number next to each of `units`; of two, the one whose code is even."""
    whole: NDArray[np.float64] = np.rint(units)
    if not info.fraction_bits:  # the code is the exponent's, and 0 stands for zero
        codes = exponents - (info.min_exponent - 1)
        whole[(units == 1.5) & (codes % 2 == 0)] = 1.0
    return whole


def _skip_subnormals(
    magnitudes: NDArray[Any],
    result: NDArray[Any],
    smallest: float,
    lanes: NDArray[np.uint32] | None,
) -> None:
    """Below `smallest` the neighbours are zero, of even code, and `smallest`, which is odd."""
    below = magnitudes < smallest
    if lanes is None:
        rises = magnitudes > smallest / 2
    else:  # floor_divide is exact, where the quotient itself would be rounded
        rises = lanes < np.floor_divide(magnitudes * 2.0**32, smallest)
    result[below] = np.where(rises, smallest, 0.0)[below]


def _overflow(result: NDArray[Any], info: FormatInfo) -> None:
    """Values beyond the finite ones become infinity, or NaN in a format without infinity."""
    above, below = result > info.largest, result < info.lowest
    if above.any():
        result[above] = np.inf if info.has_infinity else np.nan
    if below.any():
        result[below] = -np.inf if info.has_infinity and info.lowest else np.nan
