"""The exact sum of any number of values, and its correct rounding: the reference of errors.

Sums are several float64 numbers, made by error-free additions.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.fallback import kernels, round_to
from gpusim.fallback.formats import FLOAT64, FormatInfo

__all__ = ["Exact", "ExactSum", "exact_sum"]

Reals = NDArray[np.float64]

# Elements that one NumPy call adds: enough to hide the call's own cost, and still in cache.
LANES = 16 * 1024
SPLITTER = 2.0**27 + 1
#: Levels of any sum of 2**26 rows: a level holds 2**26 errors, of half its neighbour's last bit at
#: most, so it is 53 - 26 bits below it. Exponents of float64 span 2,098 bits.
LEVELS = -(-2098 // (53 - 26)) + 1
OUT_OF_RANGE = "an exact sum leaves the range of float64: scale the members down"


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

    def rounded(self, target: np.dtype[Any] | FormatInfo) -> NDArray[Any]:
        """The sums in the format, correctly rounded: what the best of all reductions gives."""
        if target == FLOAT64:
            return self.high
        return round_to(self.odd(), target)

    def divided(self, count: int) -> Exact:
        """The exact sums divided by `count`: exact means, to what float64 holds.

        >>> mean = exact_sum(np.array([[1.0], [2.0**-60], [0.0]])).divided(3)
        >>> from fractions import Fraction
        >>> exact = Fraction(1 + 2**60, 3 * 2**60)
        >>> high, low = mean.high.item(), mean.low.item()
        >>> high == float(exact), low == float(exact - Fraction(high))
        (True, True)
        """
        with np.errstate(invalid="ignore"):
            # Between 1/2 and 1 remainders are exact, where subnormal numbers would lose bits.
            exponents = np.where(np.isfinite(self.high), np.frexp(self.high)[1], 0)
            high, low = np.ldexp(self.high, -exponents), np.ldexp(self.low, -exponents)
            lost = (low == 0) & (self.low != 0)  # its sign still says where between two floats
            low = np.where(
                lost, np.copysign(np.finfo(np.float64).smallest_subnormal, self.low), low
            )
            first, rest = _quotient(high, count)
            rest, tail = _two_sum(rest, low)
            second, rest = _quotient(rest, count)
            total, low = _two_sum(first, _odd(second, rest + tail))
            low = np.where(np.isfinite(total), low, 0.0)
        return Exact(np.ldexp(total, exponents), np.ldexp(low, exponents))


SMALLEST = np.finfo(np.float64).smallest_subnormal


class ExactSum:
    """The exact sum of rows that come one block after the other, in any order.

    Each addition yields its rounded sum and, as a second float64 number, its error, which is
    carried to a next level of partial sums; levels are added for as long as errors are not zero.

    >>> sums = ExactSum(1)
    >>> sums.add(np.array([[1e30], [1.0]]))
    >>> sums.add(np.array([[1e-30], [-1e30]]))
    >>> sums.total().high.tolist(), sums.total().low.tolist()
    ([1.0], [1e-30])
    """

    def __init__(self, width: int) -> None:
        self._levels: list[Reals] = []
        self._sums: Reals | None = None  # those of the compiled kernel
        self._special = np.zeros(width)
        """The sums of the infinities and NaNs alone, as IEEE arithmetic has them in any order."""
        self._lock = Lock()

    @property
    def infinite(self) -> NDArray[np.bool_]:
        """Where a value was infinite or NaN."""
        return self._special != 0

    def add(self, rows: NDArray[Any]) -> None:
        """Add all rows of a block of shape (rows, width), of any floating-point dtype.

        **Raises**: OverflowError if sums leave the range of float64, here or in `total`.
        """
        compiled = kernels.compiled()
        if compiled is not None:
            with self._lock:
                if self._sums is None:
                    self._sums = np.zeros((LEVELS, len(self._special)))
                if compiled.add_exactly(rows, self._sums, self._special):
                    return
        levels, special = _add_in_lanes(rows)
        with np.errstate(invalid="ignore", over="ignore"), self._lock:
            self._special += special
            for level in levels:
                _add(self._levels, level)

    def total(self) -> Exact:
        """The sums of all rows so far.

        **Raises**: OverflowError if a sum of finite values left the range of float64 on its way.
        """
        sums = [] if self._sums is None else [row for row in self._sums if row.any()]
        with np.errstate(invalid="ignore", over="ignore"):
            exact = _normalised([*sums, *self._levels] or [np.zeros_like(self._special)])
        exact.high[self.infinite] = self._special[self.infinite]
        exact.low[self.infinite] = 0.0
        return exact


def _add_in_lanes(rows: NDArray[Any]) -> tuple[list[Reals], Reals]:
    """Numbers with the exact sum of all rows' finite values, and the sum of the others."""
    count, width = rows.shape
    lanes = 1 << (max(1, min(count, LANES // max(width, 1))).bit_length() - 1)
    levels: list[Reals] = []
    special = np.zeros(width)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, count, lanes):
            chunk = rows[start : start + lanes]
            values = np.zeros((lanes, width))
            values[: len(chunk)] = chunk
            finite = np.isfinite(values)
            if not finite.all():
                special += np.where(finite, 0.0, values).sum(axis=0)
                values[~finite] = 0.0
            _add(levels, values)
        while lanes > 1:
            lanes //= 2
            rest = [level[lanes:] for level in levels]
            levels = [level[:lanes] for level in levels]
            for level in rest:
                _add(levels, level)
    return [level[0] for level in levels], special


def exact_sum(members: NDArray[Any]) -> Exact:
    """Sum a stacked array of shape (members, elements), of any floating-point dtype, exactly.

    >>> exact = exact_sum(np.array([[1e30], [1.0], [1e-30], [-1e30]]))
    >>> exact.high.tolist(), exact.low.tolist()
    ([1.0], [1e-30])
    """
    sums = ExactSum(members.shape[1])
    sums.add(members)
    return sums.total()


def _quotient(values: Reals, count: int) -> tuple[Reals, Reals]:
    """The rounded quotient and the remainder, exactly: for values without subnormal remainders."""
    quotient = values / count
    product, rest = _two_product(quotient, float(count))
    return quotient, (values - product) - rest


def _two_product(a: Reals, b: float) -> tuple[Reals, Reals]:
    """The rounded product and its error, exactly (Dekker, with Veltkamp's splitting)."""
    product = a * b
    a_high = SPLITTER * a - (SPLITTER * a - a)
    b_high = SPLITTER * b - (SPLITTER * b - b)
    a_low, b_low = a - a_high, b - b_high
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, error


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
    if len(levels) == LEVELS:
        raise OverflowError(OUT_OF_RANGE)
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
        if not np.isfinite(levels[0]).all():
            raise OverflowError(OUT_OF_RANGE)
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
