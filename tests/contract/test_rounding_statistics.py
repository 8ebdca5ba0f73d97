"""Stochastic rounding is exact on average, and every rounding draws numbers of its own."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpusim import Format, round_to
from gpusim.fallback import fold
from gpusim.fallback import round_to as round_kernel
from gpusim.fallback.philox import Lanes

TARGETS: dict[str, tuple[Any, Format]] = {
    name: (np.dtype(getattr(ml_dtypes, name, name)), general)
    for name, general in {
        "float16": Format(5, 10),
        "bfloat16": Format(8, 7),
        "float8_e5m2": Format(5, 2),
        "float8_e4m3fn": Format(4, 3, has_infinities=False),
        "float8_e5m2fnuz": Format(5, 2, bias=16, has_infinities=False, has_negative_zero=False),
        "float8_e4m3fnuz": Format(4, 3, bias=8, has_infinities=False, has_negative_zero=False),
    }.items()
}
E3M2 = Format(3, 2, has_infinities=False, high_nans=0)
TARGETS["e3m2"] = E3M2, E3M2
DRAWS = 1_000_000


def neighbours(general: Format) -> dict[str, tuple[float, float]]:
    """Pairs of neighbouring magnitudes all over a format; the last ends where infinity begins."""
    unit, eps, top = general.smallest, general.eps, general.max
    normal = unit / eps
    ulp = 2.0 ** math.floor(math.log2(top)) * eps
    return {
        "from zero": (0.0, unit),
        "subnormal": (2 * unit, 3 * unit),
        "just below the normal numbers": (normal - unit, normal),
        "just above one": (1.0, 1 + eps),
        "just below two": (2 - eps, 2.0),
        "just below four": (4 - 2 * eps, 4.0),
        "below the largest": (top - ulp, top),
        "above the largest": (top, top + ulp),
    }


@pytest.mark.parametrize("name", TARGETS)
def test_the_mean_is_exact_all_over_the_format(name: str) -> None:
    target, general = TARGETS[name]
    for number, (where, (low, high)) in enumerate(neighbours(general).items()):
        share = [0.3, 2.0**-12, 0.9, 0.5][number % 4]
        sign = -1 if number % 2 else 1
        value = np.float64(sign * (low + share * (high - low)))
        x = np.broadcast_to(value, DRAWS)
        drawn = np.abs(round_to(x, target, rounding="stochastic", seed=number)).astype(np.float64)
        drawn[~np.isfinite(drawn)] = high  # beyond the largest value: counts as what it stands for
        assert set(np.unique(drawn)) == {low, high}, where
        error = drawn.mean() - abs(value)
        deviation = (high - low) * math.sqrt(share * (1 - share) / DRAWS)
        assert abs(error) < 5 * deviation, where


def correlations(rows: np.ndarray) -> float:
    """The largest correlation of two different rows, in standard errors."""
    found = np.corrcoef(rows) - np.eye(len(rows))
    return float(np.abs(found).max() * math.sqrt(rows.shape[1]))


def test_lanes_are_uniform_and_uncorrelated() -> None:
    drawn = np.empty(8 * 125_000, np.uint32)
    Lanes(seed=5, call=0).fill(drawn, start=0, step=1, batch_offset=0)
    share = drawn / 2.0**32
    assert abs(share.mean() - 0.5) < 5 * math.sqrt(1 / 12 / drawn.size)
    counts = np.histogram(share, 256)[0]
    squares = ((counts - drawn.size / 256) ** 2 / (drawn.size / 256)).sum()
    assert abs(squares - 255) < 5 * math.sqrt(2 * 255)
    assert correlations(share.reshape(-1, 8).T) < 5  # the eight lanes of a block
    assert correlations(share.reshape(8, -1)) < 5  # far apart
    assert correlations(np.stack([share[:-3], share[1:-2], share[2:-1], share[3:]])) < 5


@pytest.mark.parametrize("counter", ["seed", "step", "call", "place"])
def test_roundings_that_differ_in_a_counter_are_uncorrelated(counter: str) -> None:
    """One in each, and far apart: 0, 1, 2, ... and the ends of the range."""
    x = np.broadcast_to(np.float32(1 + 2.0**-11), 200_000)  # half way
    rows = [
        round_kernel(x, np.float16, rounding="stochastic", **{counter: number}) > 1
        for number in (0, 1, 2, 3, 7, 8, 2**32, 2**64 - 1)
    ]
    assert correlations(np.array(rows, np.float64)) < 5


def test_counters_do_not_stand_in_for_each_other() -> None:
    x = np.broadcast_to(np.float32(1 + 2.0**-11), 200_000)
    swapped = [
        round_kernel(x, np.float16, rounding="stochastic", step=a, call=b, place=c, seed=d) > 1
        for a, b, c, d in [(5, 0, 0, 0), (0, 5, 0, 0), (0, 0, 5, 0), (0, 0, 0, 5), (5, 5, 5, 5)]
    ]
    assert correlations(np.array(swapped, np.float64)) < 5


@pytest.mark.parametrize(
    ("varied", "folds"),
    [
        ("call", [{"call": number} for number in range(6)]),
        ("group", [{"places": number} for number in range(6)]),
        ("seed", [{"seed": number} for number in range(6)]),
    ],
)
def test_the_errors_of_folds_are_uncorrelated(varied: str, folds: list[dict[str, Any]]) -> None:
    x = np.broadcast_to(np.float16(1 + 2.0**-10), (9, 50_000))
    rows = [fold(x, rounding="stochastic", **options).astype(np.float64) for options in folds]
    assert correlations(np.array(rows)) < 5


def test_the_steps_of_a_fold_are_uncorrelated() -> None:
    """The partial results' errors: that of step s is what fold adds between s and s + 1 members."""
    x = np.broadcast_to(np.float32(1 + 2.0**-12), (9, 50_000))
    partial = [
        fold(x[:members], accumulate=np.float16, rounding="stochastic").astype(np.float64)
        for members in range(2, 10)
    ]
    errors = np.diff(np.array(partial), axis=0)
    assert correlations(errors) < 5


@pytest.mark.parametrize("name", TARGETS)
def test_a_sum_of_small_terms_that_nearest_loses_is_recovered(name: str) -> None:
    target, _ = TARGETS[name]
    accumulate = target.info if isinstance(target, Format) else target
    elements = 256
    x = np.full((4097, elements), 2.0**-13, np.float32)
    x[0] = 1.0  # the 4,096 others are half of it
    assert (fold(x, accumulate=accumulate) == 1.0).all()
    totals = fold(x, accumulate=accumulate, rounding="stochastic", seed=17).astype(np.float64)
    deviation = totals.std(ddof=1) / math.sqrt(elements)
    assert 0 < deviation < 0.05
    assert abs(totals.mean() - 1.5) < 5 * deviation
