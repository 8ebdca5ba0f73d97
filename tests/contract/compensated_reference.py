"""The compensated orders by docs/numerics.md, "Compensated sums": one number at a time, exactly.

It shares no code with the kernels: numbers are Fractions, rounded after each operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from tests.oracles.reference_fold import Number, add, negate

ZERO = Number(False, Fraction(0))
Round = Callable[[Number], Number]
ORDERS = ("kahan", "neumaier")


def compensated(order: str, xs: Sequence[Number], rounded: Round) -> Number:
    """The sum of numbers; `rounded` is the rounding of each operation."""
    return xs[0] if len(xs) == 1 else {"kahan": kahan, "neumaier": neumaier}[order](xs, rounded)


def kahan(xs: Sequence[Number], rounded: Round) -> Number:
    total, lost = xs[0], ZERO
    for x in xs[1:]:
        term = rounded(add(x, negate(lost)))
        following = rounded(add(total, term))
        lost = rounded(add(rounded(add(following, negate(total))), negate(term)))
        lost = lost if lost.finite else ZERO
        total = following
    return total


def neumaier(xs: Sequence[Number], rounded: Round) -> Number:
    total, lost = xs[0], ZERO
    for x in xs[1:]:
        following = rounded(add(total, x))
        if following.finite:
            keeps = total.magnitude >= x.magnitude
            large, small = (total, x) if keeps else (x, total)
            error = rounded(add(rounded(add(large, negate(following))), small))
            lost = rounded(add(lost, error))
            lost = lost if lost.finite else ZERO
        else:
            lost = ZERO  # an operand or the sum is infinite or NaN, and so is the error
        total = following
    return total if lost.magnitude == 0 else rounded(add(total, lost))
