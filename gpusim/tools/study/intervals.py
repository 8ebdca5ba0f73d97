"""Confidence intervals and tests of a study's figures, from the values of independent units.

A unit is an input where there are several, with the mean over its seeds, and else a seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["holm", "mean_interval", "sign_flips", "student_quantile"]

EXACT = 16
"""The most pairs whose signs are flipped in all ways: 2**16."""
FLIPS = 99_999
"""How many ways are drawn for more pairs."""
KEY = (0, int.from_bytes(b"signs", "big"))
CLOSE = 1e-12
"""Sums that differ by less, relatively, are the same: their additions are rounded."""


@lru_cache(maxsize=1024)
def student_quantile(confidence: float, freedom: int) -> float:
    """The t with P(|T| < t) = confidence, of Student's T with so many degrees of freedom.

    >>> round(student_quantile(0.95, 7), 6), round(student_quantile(0.95, 1), 6)
    (2.364624, 12.706205)
    """
    low, high = 0.0, math.pi / 2
    while (middle := 0.5 * (low + high)) not in (low, high):
        low, high = (middle, high) if _inside(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(high)


def _inside(angle: float, freedom: int) -> float:
    """P(|T| < t) with t = sqrt(freedom) tan(angle): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for n in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (n - 1) / n
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def mean_interval(
    values: Sequence[float], confidence: float, bounds: tuple[float, float] = (-math.inf, math.inf)
) -> tuple[float, float]:
    """Student's interval for the mean of independent values, within the bounds of a figure.

    NaN for fewer than two, or where one is not finite.

    >>> [round(end, 6) for end in mean_interval([1.0, 2.0, 4.0], 0.95)]
    [-1.46125, 6.127916]
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan, math.nan
    count = len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    reach = student_quantile(confidence, count - 1) * math.sqrt(variance / count)
    return max(mean - reach, min(mean, bounds[0])), min(mean + reach, max(mean, bounds[1]))


def sign_flips(differences: Sequence[float]) -> tuple[float, int]:
    """The two-sided p-value of a paired sign-flip test of a mean difference of zero.

    If the two settings do not differ, each pair's difference has either sign alike. The p-value is
    the share of all ways to choose the signs whose sum is as far from zero as the one there is, or
    farther. Up to 16 pairs have all ways; of more, 99,999 are drawn, always the same, and the one
    that there is counts among them.

    **Returns**: the p-value, and the number of ways.

    >>> sign_flips([1.0, 2.0, 3.0, 4.0])
    (0.125, 16)
    """
    found = np.array(differences, np.float64)
    size = abs(math.fsum(differences)) * (1 - CLOSE)
    count = len(found)
    if count <= EXACT:
        ways = np.arange(2**count)[:, np.newaxis] >> np.arange(count) & 1
        sums = np.abs(_signed(ways, found))
        return float(np.count_nonzero(sums >= size) / 2**count), 2**count
    generator = np.random.Generator(np.random.Philox(key=np.array(KEY, np.uint64)))
    far = 1
    for start in range(0, FLIPS, 1024):
        ways = generator.integers(0, 2, (min(1024, FLIPS - start), count), np.int8)
        far += int(np.count_nonzero(np.abs(_signed(ways, found)) >= size))
    return far / (FLIPS + 1), FLIPS + 1


def _signed(ways: NDArray[Any], values: NDArray[np.float64]) -> NDArray[np.float64]:
    total: NDArray[np.float64] = ((1.0 - 2.0 * ways) * values).sum(axis=1)
    return total


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction: p-values with which all tests together err with the chance of one.

    >>> [round(p, 12) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    found = [0.0] * len(p_values)
    least = 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        found[place] = least
    return found
