"""Rounding to any binary format: slower than the routes for the six narrow dtypes, same contract.
A format is data, a `Grid`; values are held in float32 or float64, whichever holds all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fallback.formats import FLOAT32, FLOAT64
from fallback.workspace import Workspace


@dataclass(frozen=True)
class Grid:
    """The values of a format, as far as rounding to it has to know them.

    In the binade of 2**e they are `fraction_bits` bits finer than 2**e. Below 2**`min_exponent`
    the spacing stays what it is there, down to zero; where the format has no subnormals, nothing
    but zero lies below `smallest`. `lowest` is the most negative value: 0 where there are none.
    To a `narrow` format, of fewer bits than float32, rounding may be stochastic.
    """

    fraction_bits: int
    min_exponent: int
    smallest: float
    largest: float
    lowest: float
    has_infinity: bool
    has_negative_zero: bool
    narrow: bool

    @property
    def spacing(self) -> int:
        """The exponent of the finest spacing."""
        return self.min_exponent - self.fraction_bits

    @property
    def carrier(self) -> np.dtype[Any]:
        """float32 if it holds every value exactly, else float64."""
        single = np.finfo(FLOAT32)
        fits = (
            self.fraction_bits <= single.nmant
            and self.spacing >= single.minexp - single.nmant
            and max(self.largest, -self.lowest) <= float(single.max)
        )
        return FLOAT32 if fits else FLOAT64


class GridRounder:
    """Rounds blocks of float32 or float64 to a grid; `fallback.rounding.Rounder` for dtypes."""

    exact = False

    def __init__(self, grid: Grid, stochastic: bool) -> None:
        self._grid = grid
        self.stochastic = stochastic and grid.narrow

    def __call__(
        self,
        block: NDArray[Any],
        lanes: NDArray[np.uint32] | None,
        workspace: Workspace,
        bound: float = math.inf,
    ) -> float:
        """Round `block` in place; its dtype holds all values of the grid.

        `lanes` broadcasts against it; None, or a format that is not narrow: to nearest.
        """
        block[...] = rounded(block, self._grid, lanes if self.stochastic else None)
        return math.inf


def rounded(
    block: NDArray[Any], grid: Grid, lanes: NDArray[np.uint32] | None
) -> NDArray[np.float64]:
    """The values of `block` in one rounding to `grid`. All arithmetic here is exact."""
    magnitudes = np.abs(block).astype(np.float64)
    exponents = np.frexp(magnitudes)[1] - 1
    np.maximum(exponents, grid.min_exponent, out=exponents)
    units = np.ldexp(magnitudes, grid.fraction_bits - exponents)
    if lanes is None:
        whole = _nearest(units, exponents, grid)
    else:
        whole = np.floor(units)
        whole += lanes < np.floor((units - whole) * 2.0**32)
    result = np.ldexp(whole, exponents - grid.fraction_bits)
    if grid.smallest > 2.0**grid.spacing:
        _skip_subnormals(magnitudes, result, grid.smallest, lanes)
    np.copysign(result, block, out=result)
    if not grid.has_negative_zero:
        result += 0.0
    _overflow(result, grid)
    return result


def _nearest(units: NDArray[Any], exponents: NDArray[Any], grid: Grid) -> NDArray[np.float64]:
    """The whole number next to each of `units`; of two, the one whose code is even."""
    whole: NDArray[np.float64] = np.rint(units)
    if not grid.fraction_bits:  # the code is the exponent's, and 0 stands for zero
        codes = exponents - (grid.min_exponent - 1)
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


def _overflow(result: NDArray[Any], grid: Grid) -> None:
    """What lies beyond the finite values becomes infinity, or NaN where the format has none."""
    above, below = result > grid.largest, result < grid.lowest
    if above.any():
        result[above] = np.inf if grid.has_infinity else np.nan
    if below.any():
        result[below] = -np.inf if grid.has_infinity and grid.lowest else np.nan
