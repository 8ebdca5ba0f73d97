"""Additions of several terms at once, as adders of tensor cores and of switches do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .exact import exact_sums
from .formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, NumberFormat
from .graphs import Adder
from .layout import Index, whole
from .members import Members
from .rounding import Rounder, rounder

__all__ = ["ROUNDINGS", "add_wide"]


@dataclass(frozen=True, eq=False)
class _Terms:
    """Terms as `exact_sums` reads a box's members."""

    members: Members
    box: Index
    shape: tuple[int, ...]
    width: int


def add_wide(job: Any, adder: Adder, terms: list[NDArray[Any]]) -> NDArray[Any]:
    """The sum of terms, rounded once to the accumulator, in a buffer of the job's workspace."""
    shape, arithmetic = job.shape, job.arithmetic
    if adder.kind == "aligned":
        terms = _aligned(terms, adder)
    members = Members([np.asarray(term) for term in terms])
    accumulator = arithmetic.accumulator
    box = _Terms(members, whole(shape), shape, job.out.size)
    total = exact_sums(box, odd=accumulator != FLOAT64)
    if adder.to_sum != "nearest-even":
        total = _directed(total, accumulator, adder.to_sum)
    elif accumulator != FLOAT64:
        _rounder(accumulator)(total, None, job.workspace)
    out: NDArray[Any] = job.workspace.take(arithmetic.computing, shape)
    out[...] = total.reshape(shape)
    return out


@lru_cache(maxsize=16)
def _rounder(accumulator: NumberFormat) -> Rounder:
    return rounder(FLOAT64, accumulator, False)


#: Of accumulators that are rounded to in other ways than to nearest: the bits of a fraction, the
#: exponent of the smallest number, and the largest one.
_LIMITS = {
    FLOAT32: (23, -149, float(np.finfo(np.float32).max)),
    FLOAT16: (10, -24, 65504.0),
    BFLOAT16: (7, -133, 2.0**127 * (2 - 2.0**-7)),
}

#: How aligned terms are rounded to a multiple of their unit, and sums to the accumulator.
ROUNDINGS: dict[str, Any] = {
    "toward-zero": np.trunc,
    "nearest-even": np.rint,
    "down": np.floor,
    "up": np.ceil,
    "away": lambda x: np.copysign(np.ceil(np.abs(x)), x),
    "nearest-away": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
}


def _directed(total: NDArray[Any], accumulator: NumberFormat, mode: str) -> NDArray[Any]:
    """Sums, which are float64 rounded to odd, rounded to a dtype in another way than to nearest."""
    assert isinstance(accumulator, np.dtype)
    fraction, smallest, largest = _LIMITS[accumulator]
    finite = np.where(np.isfinite(total), total, 0.0)
    units = np.maximum(np.frexp(finite)[1] - 1 - fraction, smallest)
    rounded = np.ldexp(ROUNDINGS[mode](np.ldexp(finite, -units)), units)
    stays = {"toward-zero": True, "down": rounded > 0, "up": rounded < 0}.get(mode, False)
    beyond = np.where(stays, largest, np.inf)
    rounded = np.where(np.abs(rounded) > largest, np.copysign(beyond, rounded), rounded)
    return np.where(np.isfinite(total), np.copysign(rounded, total), total)


def _aligned(terms: list[NDArray[Any]], adder: Adder) -> list[NDArray[Any]]:
    """Each term rounded to so many bits of the largest one."""
    wide = [term.astype(np.float64) for term in terms]
    largest = np.maximum.reduce([np.abs(term) for term in wide])
    units = np.frexp(np.where(np.isfinite(largest), largest, 1.0))[1] - adder.bits
    to_whole = ROUNDINGS[adder.rounding]
    cut = [np.ldexp(to_whole(np.ldexp(term, -units)), units) for term in wide]
    return [np.where(np.isfinite(term), new, term) for term, new in zip(wide, cut, strict=True)]
