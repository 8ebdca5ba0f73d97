"""gpusim.rng: normal quantiles against Decimal, and the statistics of each draw."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpusim
from gpusim.fallback import quantile
from tests.maps.draws import (
    FLOATS,
    WORD,
    assert_same_bits,
    per_replica,
    philox_words,
    rounded,
)

# --- the normal quantile ------------------------------------------------------------------------


def exact_upper_half(x: Decimal) -> tuple[Decimal, Decimal]:
    """The normal probability between 0 and x, and the density at x, to some 50 digits."""
    pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628621")
    density = (-x * x / 2).exp() / (2 * pi).sqrt()
    term = total = x
    for odd in itertools.count(3, 2):
        term = term * x * x / odd
        total += term
        if term < Decimal(10) ** -60:
            return total * density, density
    raise AssertionError


def test_normal_quantiles_are_within_6_units_in_the_last_place() -> None:
    drawn = np.random.default_rng(0).integers(0, 2**63, 600, dtype=np.uint64)
    shifts = np.random.default_rng(1).integers(0, 63, 200).astype(np.uint64)
    edge = round((0.425) * WORD)  # where one approximation takes over from another
    far = 2**63 - round(math.exp(-25.0) * WORD)
    words = np.concatenate(
        [
            drawn[:200],
            drawn[200:400] >> shifts,
            np.uint64(2**63 - 1) - (drawn[400:] >> shifts),
            np.array([0, 1, edge - 2**13, edge, edge + 2**13, far - 9, far + 9, 2**63 - 1], "u8"),
        ]
    )
    with localcontext() as context:
        context.prec = 55
        for drew, x in zip(words.tolist(), quantile.normal_quantile(words).tolist(), strict=True):
            probability, density = exact_upper_half(Decimal(x))
            error = (probability - (Decimal(drew) + Decimal("0.5")) / WORD) / density
            error -= Decimal(x) * error * error / 2  # Newton's next term
            assert abs(error) < 6 * Decimal(math.ulp(x)), (drew, x)


def test_normal_quantiles_are_those_of_the_standard_library() -> None:
    p = np.random.default_rng(0).random(5000)
    words = (p * 2.0**64).astype(np.uint64) ^ np.uint64(2**63)
    theirs = [statistics.NormalDist().inv_cdf((int(w) ^ 2**63) / WORD) for w in words]
    np.testing.assert_allclose(quantile.normal_quantile(words), theirs, rtol=1e-12, atol=1e-15)


def scalar_quantile(drawn: int) -> float:
    """The quantile in Python's floats: each operation is IEEE's."""

    def horner(coefficients: tuple[float, ...], x: float) -> float:
        total = coefficients[0]
        for coefficient in coefficients[1:]:
            total = total * x + coefficient
        return total

    def ratio(table: Any, x: float) -> float:
        return horner(table[0], x) / horner(table[1], x)

    negative = drawn >= 2**63
    distance = WORD - 1 - drawn if negative else drawn
    q = (float(distance) + 0.5) * 2.0**-64
    if q <= 0.425:
        z = ratio(quantile.CENTRE_RATIO, 0.180625 - q * q) * q
    else:
        fraction, exponent = math.frexp((float(2**63 - 1 - distance) + 0.5) * 2.0**-64)
        if fraction * 2 <= math.sqrt(2):
            fraction, exponent = fraction * 2, exponent - 1
        s = (fraction - 1) / (fraction + 1)
        series = horner(quantile.ATANH_SERIES, s * s) * (s * s) * s
        log = (series + exponent * quantile.LOG2_LOW) + (s + s) + exponent * quantile.LOG2_HIGH
        r = math.sqrt(-log)
        near = ratio(quantile.TAIL_RATIO, r - 1.6) if r <= 5 else None
        z = ratio(quantile.FAR_TAIL_RATIO, r - 5) if near is None else near
    return -z if negative else z


def test_normal_quantiles_are_plain_ieee_arithmetic() -> None:
    generator = np.random.default_rng(0)
    words = generator.integers(0, WORD, 3000, dtype=np.uint64, endpoint=False)
    tails = np.uint64(2**63 - 1) - (words[:500] >> generator.integers(1, 63, 500).astype("u8"))
    words = np.concatenate([words, tails, ~tails])
    assert quantile.normal_quantile(words).tolist() == [scalar_quantile(w) for w in words.tolist()]


def test_normal_quantiles_rise_and_are_symmetric() -> None:
    words = np.sort(np.random.default_rng(0).integers(-(2**63), 2**63, 20_000)).view(np.uint64)
    z = quantile.normal_quantile(words)
    assert (np.diff(z) >= 0).all()
    assert_same_bits(quantile.normal_quantile(~words), -z)
    assert np.isfinite(z).all() and (z != 0).all()


def test_normal_quantiles_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.random.Philox(3).random_raw(1001).reshape(7, 143)
    whole = quantile.normal_quantile(words)
    for block in (1, 2, 5, 64):
        monkeypatch.setattr(quantile, "BLOCK", block)
        assert_same_bits(quantile.normal_quantile(words), whole)


def test_logarithms_are_within_one_unit_in_the_last_place() -> None:
    generator = np.random.default_rng(0)
    x = (0.5 - generator.random(400) * 0.25) * 2.0 ** -generator.integers(0, 64, 400)
    with localcontext() as context:
        context.prec = 40
        for value, ours in zip(x.tolist(), quantile.natural_log(x).tolist(), strict=True):
            assert abs(Decimal(value).ln() - Decimal(ours)) < Decimal(math.ulp(ours))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_normal_is_one_rounding_of_float64_arithmetic(dtype: np.dtype) -> None:
    drawn = per_replica(lambda: gpusim.rng(9, "i").normal(40, 3, 0.1, dtype), 2)
    assert drawn.dtype == dtype
    for replica in range(2):
        words = np.array(philox_words(9, 0, replica, 40), np.uint64)
        for ours, z in zip(drawn[replica], quantile.normal_quantile(words).tolist(), strict=True):
            assert ours == rounded(Fraction(3 + 0.1 * z), dtype)


def test_the_bits_are_these() -> None:
    """Pinned, so that no change of NumPy's or ours goes unseen."""

    def f() -> Any:
        g = gpusim.rng(2024, "i", calls=3)
        return (
            g.uniform(2, dtype="float64"),
            g.normal(2, dtype="float64"),
            g.integers(1000, shape=2),
        )

    uniform, normal, integers = per_replica(f, 2)
    assert [[x.hex() for x in row] for row in uniform.tolist()] == PINNED_UNIFORM
    assert [[x.hex() for x in row] for row in normal.tolist()] == PINNED_NORMAL
    assert integers.tolist() == PINNED_INTEGERS


PINNED_UNIFORM = [
    ["0x1.db8d8fbb12700p-8", "0x1.85a46be53ddbcp-1"],
    ["0x1.0354df4f5b782p-2", "0x1.7ae803b103719p-1"],
]
PINNED_NORMAL = [
    ["0x1.60b58b6d1be23p-2", "0x1.ec477a20a5d28p-2"],
    ["0x1.d1cd3a7d51637p-1", "0x1.697e6be35f5bfp-1"],
]
PINNED_INTEGERS = [[50, 768], [294, 624]]


# --- statistics (fixed seeds: they hold once and for all) ---------------------------------------

N = 50_000
LARGEST_KS = math.sqrt(-math.log(1e-6 / 2) / 2)  # of sqrt(n) * D; exceeded once in 1e6


def ks(values: np.ndarray, distribution: Callable[[np.ndarray], np.ndarray]) -> float:
    expected = distribution(np.sort(values))
    grid = np.arange(len(values) + 1) / len(values)
    distance = max((grid[1:] - expected).max(), (expected - grid[:-1]).max())
    return float(distance * math.sqrt(len(values)))


def chi_square_is_plausible(counts: np.ndarray) -> bool:
    """Within five standard deviations of its mean."""
    expected, degrees = counts.sum() / counts.size, counts.size - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return bool(abs(statistic - degrees) < 5 * math.sqrt(2 * degrees))


@pytest.fixture(scope="module")
def streams() -> dict[str, np.ndarray]:
    """Uniform numbers that differ in one of replica, call or seed only."""

    def calls() -> Any:
        generator = gpusim.rng(0, "i")
        return np.stack([generator.uniform(N, dtype="float64") for _ in range(4)])

    four_calls = per_replica(calls, 4)
    seeds = [
        per_replica(lambda s=s: gpusim.rng(s, "i").uniform(N, dtype="float64"), 1)[0]
        for s in (0, 1, 2, WORD - 1)
    ]
    return {"replicas": four_calls[:, 0], "calls": four_calls[0], "seeds": np.stack(seeds)}


@pytest.mark.parametrize("what", ["replicas", "calls", "seeds"])
def test_streams_are_uncorrelated(streams: dict[str, np.ndarray], what: str) -> None:
    centred = streams[what] - 0.5
    for (a, first), (b, second) in itertools.combinations(enumerate(centred), 2):
        for lag in (0, 1, 4):
            products = first[: N - lag] * second[lag:] * 12
            assert abs(products.mean()) < 5 / math.sqrt(N - lag), (a, b, lag)
    for series in centred:
        assert abs((series[1:] * series[:-1] * 12).mean()) < 5 / math.sqrt(N - 1)


@pytest.mark.parametrize("what", ["replicas", "calls", "seeds"])
def test_uniform_numbers_are_uniform(streams: dict[str, np.ndarray], what: str) -> None:
    for series in streams[what]:
        assert ks(series, lambda x: x) < LARGEST_KS
        assert abs(series.mean() - 0.5) < 5 / math.sqrt(12 * N)


def test_streams_differ_from_those_of_stochastic_rounding() -> None:
    ours = per_replica(lambda: gpusim.rng(0, "i").integers(0, WORD, 8, np.uint64), 2)
    key, counter = np.zeros(2, np.uint64), np.zeros(4, np.uint64)
    theirs = np.random.Philox(key=key, counter=counter).random_raw(8)
    assert not np.isin(ours, theirs).any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_normal_numbers_have_their_mean_and_variance(dtype: np.dtype) -> None:
    z = per_replica(lambda: gpusim.rng(0, "i").normal(N, dtype=dtype), 2).astype(np.float64).ravel()
    grain = float(ml_dtypes.finfo(dtype).eps) ** 2  # rounding adds about eps**2 / 24 of variance
    assert abs(z.mean()) < 5 / math.sqrt(z.size)
    assert abs(z.var() - 1) < 5 * math.sqrt(2 / z.size) + grain
    assert abs((z**3).mean()) < 5 * math.sqrt(15 / z.size)
    assert abs((z**4).mean() - 3) < 5 * math.sqrt(96 / z.size) + 6 * grain


def test_normal_numbers_are_normal() -> None:
    z = per_replica(lambda: gpusim.rng(1, "i").normal(N, 2, 3, "float64"), 2).ravel()
    normal = np.frompyfunc(statistics.NormalDist(2, 3).cdf, 1, 1)
    assert ks(z, lambda x: normal(x).astype(np.float64)) < LARGEST_KS


@pytest.mark.parametrize("n", [2, 3, 7, 10, 100])
def test_integers_are_equally_frequent(n: int) -> None:
    drawn = per_replica(lambda: gpusim.rng(0, "i").integers(n, shape=N), 2)
    assert chi_square_is_plausible(np.bincount(drawn.ravel(), minlength=n))


def test_integers_of_a_range_that_is_often_refused_are_equally_frequent() -> None:
    # A word times 3 * 2**61 // 2**64 without refusals would give every third value twice as often.
    n = 3 * 2**61 + 1
    drawn = per_replica(lambda: gpusim.rng(0, "i").integers(0, n, N, np.uint64), 1)[0]
    for modulus in (3, 5):
        counts = np.bincount((drawn % np.uint64(modulus)).astype(np.int64), minlength=modulus)
        assert chi_square_is_plausible(counts)
    assert ks(drawn / n, lambda x: x) < LARGEST_KS


@pytest.mark.parametrize("p", [0.001, 0.3, 0.5, 0.99])
def test_bernoulli_is_true_as_often_as_p_says(p: float) -> None:
    drawn = per_replica(lambda: gpusim.rng(0, "i").bernoulli(p, N), 2)
    assert abs(drawn.mean() - p) < 5 * math.sqrt(p * (1 - p) / drawn.size)


def test_all_orders_of_three_are_equally_frequent() -> None:
    drawn = per_replica(lambda: gpusim.rng(0, "i").permutation(3), 60_000)
    counts = np.bincount(drawn @ np.array([9, 3, 1]))
    assert np.count_nonzero(counts) == 6
    assert chi_square_is_plausible(counts[counts > 0])
