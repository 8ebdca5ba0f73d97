"""The exact order: the sum of all members as if added without any rounding, rounded once.

Members are added in float64 in pairs, each addition with its error (Knuth's TwoSum), and the errors
are added in the same way. Where no error of these second additions is lost, the two sums are the
exact sum. Where one is, or a sum overflows, the element is added again in integers: 32-bit digits
that reach over all of float64.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from . import limits
from .decode import decode_all
from .formats import FLOAT64
from .jobs import FoldJob
from .layout import Index
from .members import Members

Floats = NDArray[np.float64]

_FRACTION_BITS = 52
_LEAST = -1074  # all float64 numbers are multiples of 2 to this power
_DIGIT = 32
_MASK = np.int64((1 << _DIGIT) - 1)
# Of zeros below the last digit, so that three digits always follow; of all the exponents and the
# two digits that a significand reaches into; and two for the carries.
_BELOW, _DIGITS = 2, 2 + (2045 // _DIGIT + 3) + 2


def fold_exact(job: FoldJob) -> None:
    """Fold a box: the exact sum, rounded to the accumulator as step 1, and finished."""
    arithmetic = job.arithmetic
    box = _Box(job.members, job.block.box, job.shape, job.out.size)
    total = exact_sums(box, odd=arithmetic.accumulator != FLOAT64)
    if job.plan.folded > 1:  # one member is never rounded
        arithmetic.round_sum(total, job.draws, job.workspace)
    job.finish(total.reshape(job.shape).astype(arithmetic.computing, copy=False))


class Rows(Protocol):
    """What is added: a box of members, of this shape and number of elements."""

    @property
    def members(self) -> Members: ...
    @property
    def box(self) -> Index: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def width(self) -> int: ...


class _Box(NamedTuple):
    members: Members
    box: Index
    shape: tuple[int, ...]
    width: int


def exact_sums(job: Rows, odd: bool) -> Floats:
    """The exact sums of a box's elements, rounded once: to odd, or else to nearest.

    Rounded to odd, an inexact sum is the neighbour in float64 whose last bit is 1. A later
    rounding to 51 bits or fewer gives the bits that the exact sum would.
    """
    count, width = job.members.count, job.width
    doubtful = np.zeros(width, np.bool_)
    high: Floats | None = None
    low: Floats | None = None
    for rows in _chunks(job, count, width):
        above, below = _join(rows, None, doubtful)
        if high is None:
            high, low = above, below
            continue
        if low is not None or below is not None:
            zeros = np.zeros((1, width))
            low = np.concatenate([zeros if each is None else each for each in (low, below)])
        high, low = _join(np.concatenate([high, above]), low, doubtful)
    assert high is not None
    total: Floats = high[0]
    if low is not None:
        first = low[0]
        second, rest = _two_sum(total, first)
        total = np.where(first == 0, total, second)  # -0 stays
        np.logical_or(doubtful, ~np.isfinite(rest), out=doubtful)
        if odd:
            _to_odd(total, rest)
    np.logical_or(doubtful, ~np.isfinite(total), out=doubtful)
    if doubtful.any():
        (places,) = np.nonzero(doubtful)
        total[places] = _by_digits(job, count, width, places, odd)
    return total


def _chunks(job: Rows, count: int, width: int) -> Any:
    """All members of the box as float64, some rows at a time, in memory used again."""
    chunk = max(2, limits.EXACT_BLOCK // width)
    rows = np.empty((min(chunk, count), *job.shape))
    for first in range(0, count, chunk):
        number = min(chunk, count - first)
        members = job.members.rows(slice(first, first + number), job.box)
        decode_all(members, rows[:number])
        yield rows[:number].reshape(number, width)


def _join(
    high: Floats, low: Floats | None, doubtful: NDArray[np.bool_]
) -> tuple[Floats, Floats | None]:
    """Add all rows of `high` and `low` (None: zeros): one row each, whose sum is theirs.

    Marks as doubtful the elements where it is not.
    """
    while len(high) > 1:
        half = len(high) // 2
        high, errors = _add_halves(high)
        if low is not None:
            low, lost = _add_halves(low)
            doubtful |= (lost != 0).any(axis=0)
            low[:half], lost = _two_sum(low[:half], errors)
            doubtful |= (lost != 0).any(axis=0)
        elif not _all_zero(errors):
            low = np.zeros_like(high)
            low[:half] = errors
    return high, low


def _all_zero(block: Floats) -> bool:
    return bool(np.maximum.reduce(block, axis=None) == 0 == np.minimum.reduce(block, axis=None))


def _add_halves(rows: Floats) -> tuple[Floats, Floats]:
    """The last half of the rows added to the first; a row between stays. And the errors."""
    half = len(rows) // 2
    total, errors = _two_sum(rows[:half], rows[-half:])
    if len(rows) % 2:
        total = np.concatenate([total, rows[half : half + 1]])
    return total, errors


def _two_sum(left: Floats, right: Floats) -> tuple[Floats, Floats]:
    """The sum, and its error: their exact sum is that of the arguments, unless one is not finite.

    Knuth, The Art of Computer Programming 2, 4.2.2, theorem B.
    """
    total = left + right
    virtual = total - left
    errors = total - virtual
    np.subtract(left, errors, out=errors)
    np.subtract(right, virtual, out=virtual)
    errors += virtual
    return total, errors


def _to_odd(total: Floats, rest: Floats) -> None:
    """Where `rest` is not 0 and the last bit of `total` is, go to the neighbour towards `rest`."""
    bits = total.view(np.int64)
    moves = (rest != 0) & (bits & 1 == 0)
    bits += moves * np.where((rest > 0) == (total > 0), 1, -1)


def _by_digits(job: Rows, count: int, width: int, places: NDArray[np.intp], odd: bool) -> Floats:
    """The exact sums of the elements at `places`, in integers."""
    digits = np.zeros((_DIGITS, len(places)), np.int64)
    special = np.zeros(len(places))  # the sum of what is not finite
    for rows in _chunks(job, count, width):
        for values in rows[:, places]:
            _add_digits(digits, special, values)
    total = _value_of(digits, odd)
    return np.where(special != 0, special, total)


def _add_digits(digits: NDArray[np.int64], special: Floats, values: Floats) -> None:
    """Add a number to each column; digits stay within 64 bits for 2**29 numbers."""
    finite = np.isfinite(values)
    if not finite.all():
        special += np.where(finite, 0.0, values)
        values = np.where(finite, values, 0.0)
    bits = values.view(np.int64)
    exponents = (bits >> _FRACTION_BITS) & 0x7FF
    significands = bits & ((1 << _FRACTION_BITS) - 1)
    significands |= (exponents > 0).astype(np.int64) << _FRACTION_BITS
    position = np.maximum(exponents, 1) - 1  # the values are significands * 2**(position + _LEAST)
    shift = position % _DIGIT
    sign = np.where(bits < 0, -1, 1)
    low, high = (significands & _MASK) << shift, (significands >> _DIGIT) << shift
    parts = low & _MASK, (low >> _DIGIT) + (high & _MASK), high >> _DIGIT
    first, columns = position // _DIGIT + _BELOW, np.arange(len(values))
    for further, part in enumerate(parts):
        digits[first + further, columns] += sign * part


def _value_of(digits: NDArray[np.int64], odd: bool) -> Floats:
    """The columns' values, rounded to float64 to odd, or to nearest; spoils the digits."""
    _carry(digits)
    negative = digits[-1] < 0
    np.negative(digits, where=negative, out=digits)
    _carry(digits)
    nonzero = digits != 0
    top = len(digits) - 1 - np.argmax(nonzero[::-1], axis=0)
    np.maximum(top, _BELOW, out=top)
    columns = np.arange(digits.shape[1])
    first, second, third = (digits[top - k, columns].astype(np.uint64) for k in range(3))
    below = np.arange(len(digits)).reshape(-1, 1) < top - 2
    more = (nonzero & below).any(axis=0)
    # The 64 bits from the leading one on, of which float64 has 53.
    length = np.frexp(first.astype(np.float64))[1]
    up = length.astype(np.uint64)
    word = first << (np.uint64(63) - up) << np.uint64(1)
    word |= second << (np.uint64(32) - up)
    word |= third >> up
    more |= third & ((np.uint64(1) << up) - np.uint64(1)) != 0
    kept, dropped = word >> np.uint64(11), word & np.uint64(0x7FF)
    if odd:
        kept |= ((dropped != 0) | more).astype(np.uint64)
    else:
        half = np.uint64(0x400)
        rises = (dropped > half) | ((dropped == half) & (more | (kept & np.uint64(1) == 1)))
        kept += rises.astype(np.uint64)
    exponent = length + _DIGIT * (top - 2 - _BELOW) + _LEAST + 11
    value: Floats = np.ldexp(kept.astype(np.float64), exponent.astype(np.int32))
    return np.where(negative, -value, value)


def _carry(digits: NDArray[np.int64]) -> None:
    """Move what is beyond 32 bits up; the last digit has the sign."""
    for low, high in pairwise(digits):
        high += low >> _DIGIT
        low &= _MASK
