"""The exact sum of any number of values, and its correct rounding: the reference of errors.

Sums are several float64 numbers, made by error-free additions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fallback import round_to
from fallback.formats import FLOAT64

__all__ = ["Exact", "exact_sum"]

Reals = NDArray[np.float64]

# Elements that one NumPy call adds: enough to hide the call's own cost, and still in cache.
LANES = 16 * 1024


@dataclass(frozen=True)
class Exact:
    """Sums, element by element: `high` is the exact sum rounded to nearest in float64.

    `low` is the remainder. Bits below its last one are absorbed: they make it odd if they are not
    zero. `high` is infinite or NaN where a value was.
    """

    high: Reals
    low: Reals

    def odd(self) -> Reals:
        """The sum with 53 bits, the last of which is 1 where bits are missing.

        To round this to a format of at most 51 bits is to round the exact sum.
        """
        return _odd(self.high, self.low)

    def rounded(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The sums in the format, correctly rounded: what the best of all reductions gives."""
        if dtype == FLOAT64:
            return self.high
        return round_to(self.odd(), dtype)


def exact_sum(members: NDArray[Any]) -> Exact:
    """Sum a stacked array of shape (members, elements), of any floating-point dtype, exactly.

    Each addition yields its rounded sum and, as a second float64 number, its error, which is
    carried to a next level of partial sums; levels are added for as long as errors are not zero.

    >>> exact = exact_sum(np.array([[1e30], [1.0], [1e-30], [-1e30]]))
    >>> exact.high.tolist(), exact.low.tolist()
    ([1.0], [1e-30])
    """
    count, width = members.shape
    lanes = max(1, min(count, LANES // max(width, 1)))
    bad = np.zeros(width, bool)
    levels: list[Reals] = []
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, count, lanes):
            rows = np.zeros((lanes, width))
            chunk = members[start : start + lanes]
            rows[: len(chunk)] = chunk
            finite = np.isfinite(rows)
            if not finite.all():
                bad |= ~finite.all(axis=0)
                rows[~finite] = 0.0
            _add(levels, rows)
        sums: list[Reals] = []
        for level in levels:
            for row in level:
                _add(sums, row.copy())
        exact = _normalised(sums)
        if bad.any():  # an infinity, or NaN: as IEEE arithmetic has it, in any order
            exact.high[bad] = members[:, bad].astype(np.float64).sum(axis=0)
            exact.low[bad] = 0.0
    return exact


def _two_sum(a: Reals, b: Reals) -> tuple[Reals, Reals]:
    """The rounded sum and its error, exactly (Knuth)."""
    total = a + b
    virtual = total - a
    return total, (a - (total - virtual)) + (b - virtual)


def _add(levels: list[Reals], carry: Reals) -> None:
    """Add `carry` to the sum of the `levels`; add a level for the error that remains."""
    for index, level in enumerate(levels):
        levels[index], carry = _two_sum(level, carry)
        if not carry.any():
            return
    levels.append(carry)


def _normalised(levels: list[Reals]) -> Exact:
    """Add upwards until every level is the rounding error of those above it."""
    levels = [*levels, *(np.zeros_like(levels[0]) for _ in range(3 - len(levels)))]
    moved = True
    while moved:
        moved = False
        for k in range(len(levels) - 1, 0, -1):
            total, rest = _two_sum(levels[k - 1], levels[k])
            moved |= bool((total != levels[k - 1]).any())
            levels[k - 1], levels[k] = total, rest
    low = levels[1]
    tail = levels[2]
    for level in levels[3:]:  # only the sign of what is below matters
        tail = np.where(tail == 0, level, tail)
    # Exactly between two numbers, `low` alone would not say which one is nearer.
    return Exact(*_two_sum(levels[0], _odd(low, tail)))


def _odd(values: Reals, rest: Reals) -> Reals:
    """Of the two float64 numbers around value + rest, the odd one; `values` where rest is 0."""
    even = (values.view(np.int64) & 1) == 0
    towards = np.copysign(np.inf, rest)
    return np.where(even & (rest != 0) & np.isfinite(values), np.nextafter(values, towards), values)
