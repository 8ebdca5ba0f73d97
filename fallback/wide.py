"""Additions of several terms at once, as adders of tensor cores and of switches do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .exact import exact_sums
from .formats import FLOAT64, NumberFormat
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
    if accumulator != FLOAT64:
        _rounder(accumulator)(total, None, job.workspace)
    out: NDArray[Any] = job.workspace.take(arithmetic.computing, shape)
    out[...] = total.reshape(shape)
    return out


@lru_cache(maxsize=16)
def _rounder(accumulator: NumberFormat) -> Rounder:
    return rounder(FLOAT64, accumulator, False)


#: How aligned terms are rounded to a multiple of their unit.
ROUNDINGS: dict[str, Any] = {
    "toward-zero": np.trunc,
    "nearest-even": np.rint,
    "down": np.floor,
    "up": np.ceil,
}


def _aligned(terms: list[NDArray[Any]], adder: Adder) -> list[NDArray[Any]]:
    """Each term rounded to so many bits of the largest one."""
    wide = [term.astype(np.float64) for term in terms]
    largest = np.maximum.reduce([np.abs(term) for term in wide])
    units = np.frexp(np.where(np.isfinite(largest), largest, 1.0))[1] - adder.bits
    to_whole = ROUNDINGS[adder.rounding]
    cut = [np.ldexp(to_whole(np.ldexp(term, -units)), units) for term in wide]
    return [np.where(np.isfinite(term), new, term) for term, new in zip(wide, cut, strict=True)]
