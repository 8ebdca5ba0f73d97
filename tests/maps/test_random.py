"""gpusim.rng: the bits of every draw, the same in every executor; their statistics; counting."""

from __future__ import annotations

import contextvars
import copy
import itertools
import json
import math
import pickle
import re
import statistics
import threading
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import optree
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpusim
from gpusim import lax
from gpusim.fallback import quantile
from gpusim.fallback import random as kernels
from tests.oracles.machine_time import PATIENCE

FLOATS = tuple(map(np.dtype, ("float16", ml_dtypes.bfloat16, "float32", "float64")))
INTEGERS = tuple(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
WORD = 2**64
few = settings(max_examples=60, deadline=None, database=None)
word = st.one_of(st.integers(0, WORD - 1), st.sampled_from((0, 1, 2**32, 2**63, WORD - 1)))


# --- a second, scalar account of the streams, on words that NumPy draws -------------------------


def philox_words(seed: int, call: int, replica: int, count: int, candidate: int = 0) -> list[int]:
    key, counter = np.array([seed, 1], np.uint64), [0, call, replica, candidate]
    generator = np.random.Philox(key=key, counter=np.array(counter, np.uint64))
    return generator.random_raw(count).tolist()


def integer_of(seed: int, call: int, replica: int, element: int, low: int, high: int) -> int:
    n = high - low
    for candidate in itertools.count():
        drawn = philox_words(seed, call, replica, element + 1, candidate)[-1]
        if drawn * n % WORD >= WORD % n:
            return low + drawn * n // WORD
    raise AssertionError


def rounded(exact: Fraction, dtype: np.dtype) -> Any:
    """The nearest number of `dtype`, ties to even, from comparisons with its neighbours."""
    near = np.asarray(float(exact)).astype(dtype)[()]
    step = [np.nextafter(near, dtype.type(s * np.inf)) for s in (-1, 1)]
    finite = [c for c in (near, *step) if np.isfinite(c)]
    unsigned = np.dtype(f"u{dtype.itemsize}")
    return min(
        finite,
        key=lambda c: (abs(Fraction(float(c)) - exact), int(np.asarray(c).view(unsigned)) % 2),
    )


# --- running under every executor ---------------------------------------------------------------

MAPS: dict[str, Callable[..., Any]] = {
    "vmap": gpusim.vmap,
    "pmap": gpusim.pmap,
    "pmap one": partial(gpusim.pmap, schedule="one"),
}
Axes = tuple[tuple[str, int], ...]


def nested(kinds: tuple[str, ...], axes: Axes) -> Callable[[Callable[[], Any]], Any]:
    """Runs a function without arguments under one map for each axis, the first outermost."""

    def run(f: Callable[[], Any]) -> Any:
        for kind, (name, size) in reversed(list(zip(kinds, axes, strict=True))):
            f = MAPS[kind](f, axis_name=name, axis_size=size)
        return f()

    return run


def on_mesh(axes: Axes) -> Callable[[Callable[[], Any]], Any]:
    names, sizes = zip(*axes, strict=True)

    def run(f: Callable[[], Any]) -> Any:
        def shard() -> Any:
            ahead = tuple(range(len(axes)))
            return optree.tree_map(lambda leaf: np.expand_dims(leaf, ahead), f())

        return gpusim.shard_map(shard, gpusim.Mesh(sizes, names), (), gpusim.P(*names))()

    return run


def executors(axes: Axes) -> dict[str, Callable[[Callable[[], Any]], Any]]:
    kinds = itertools.product(MAPS, repeat=len(axes))
    return {"shard_map": on_mesh(axes), **{" in ".join(k[::-1]): nested(k, axes) for k in kinds}}


def per_replica(f: Callable[[], Any], size: int, axis_name: str = "i") -> Any:
    return gpusim.vmap(f, axis_name=axis_name, axis_size=size)()


def assert_same_bits(ours: Any, theirs: Any, where: str = "") -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, where
    assert ours.tobytes() == theirs.tobytes(), where


DRAWS: dict[str, Callable[[gpusim.rng], Any]] = {
    "uniform": lambda g: g.uniform((3, 5), -2, 7),
    "uniform float64": lambda g: g.uniform(7, dtype="float64"),
    "uniform bfloat16": lambda g: g.uniform(7, dtype=ml_dtypes.bfloat16),
    "normal": lambda g: g.normal((5,)),
    "normal float64": lambda g: g.normal((), 3, 2, np.float64),
    "normal float16": lambda g: g.normal((1, 3), dtype=np.float16),
    "integers": lambda g: g.integers(-3, 11, (7,)),
    "integers of many": lambda g: g.integers(0, 2**63 + 1, (5,), np.uint64),
    "bernoulli": lambda g: g.bernoulli(0.3, (3, 3)),
    "permutation": lambda g: g.permutation(7),
    "permutation of an array": lambda g: g.permutation(np.arange(12).reshape(2, 6), axis=1),
    "empty": lambda g: g.normal((0, 3)),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("axis_name", ["x", "y", ("x", "y"), ("y", "x")])
def test_every_executor_and_nesting_draws_the_same_bits(draw: str, axis_name: Any) -> None:
    axes = (("x", 2), ("y", 3))
    inside = gpusim.rng(5, axis_name).state

    def program(generator: gpusim.rng | None = None) -> Any:
        generator = generator or gpusim.rng.from_state(inside)
        return [DRAWS[draw](generator), DRAWS[draw](generator)]

    first, *others = executors(axes).items()
    reference = first[1](program)
    for name, run in others:
        for result, expected in zip(run(program), reference, strict=True):
            assert_same_bits(np.asarray(result), np.asarray(expected), name)
        outside = gpusim.rng(5, axis_name)
        for result, expected in zip(run(lambda g=outside: program(g)), reference, strict=True):
            assert_same_bits(np.asarray(result), np.asarray(expected), f"{name}, made outside")
        assert outside.calls == 2


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_a_replica_draws_the_same_however_many_there_are(size: int) -> None:
    all_seven = per_replica(lambda: gpusim.rng(1, "i").uniform(5), 7)
    assert_same_bits(per_replica(lambda: gpusim.rng(1, "i").uniform(5), size), all_seven[:size])


def test_replicas_are_counted_in_the_order_of_the_names() -> None:
    axes = (("x", 2), ("y", 3))
    draw = {
        names: nested(("vmap", "pmap"), axes)(lambda n=names: gpusim.rng(0, n).integers(2**62))
        for names in (("x", "y"), ("y", "x"))
    }
    flat = per_replica(lambda: gpusim.rng(0, "i").integers(2**62), 6)
    assert np.array_equal(draw["x", "y"], flat.reshape(2, 3))
    assert np.array_equal(draw["y", "x"], flat.reshape(3, 2).T)


def test_replicas_along_other_axes_draw_the_same() -> None:
    drawn = nested(("pmap", "vmap"), (("x", 2), ("y", 3)))(lambda: gpusim.rng(0, "x").normal(4))
    assert (drawn == drawn[:, :1]).all() and not (drawn[0] == drawn[1]).any()


def test_what_is_the_same_on_all_replicas_around_converts_freely() -> None:
    def f() -> Any:
        drawn = gpusim.rng(0, "x").uniform()
        assert isinstance(drawn, gpusim.MappedArray) and drawn.mapped_axes == ()
        return drawn if float(drawn) < 2 else -drawn

    nested(("pmap", "vmap"), (("x", 2), ("y", 3)))(f)


def test_draws_under_vmap_are_mapped_and_under_pmap_plain() -> None:
    def f(kind: type) -> Any:
        drawn = gpusim.rng(0, "i").normal((2, 3))
        assert type(drawn) is kind and drawn.shape == (2, 3)
        return drawn

    gpusim.vmap(lambda: f(gpusim.MappedArray), axis_name="i", axis_size=2)()
    gpusim.pmap(lambda: f(np.ndarray), "i", axis_size=2)()


# --- the bits -----------------------------------------------------------------------------------


@few
@given(word, word, word, st.sampled_from((0, 1, 3, WORD - 1)), st.integers(0, 21))
def test_words_are_those_of_numpys_philox(
    seed: int, call: int, replica: int, candidate: int, count: int
) -> None:
    stream = kernels.Stream(seed, call, np.array([replica], np.uint64))
    expected = philox_words(seed, call, replica, count, candidate)
    assert stream.words(count, candidate).tolist() == [expected]
    many = kernels.Stream(seed, call, np.full(kernels.SETUPS_PER_PHILOX, replica, np.uint64))
    assert many.words(count, candidate).tolist() == [expected] * kernels.SETUPS_PER_PHILOX
    elements = np.arange(count)[::-1]
    backwards = stream.words_at(np.full(count, replica, np.uint64), elements, candidate)
    assert backwards.tolist() == expected[::-1]


def test_many_replicas_are_drawn_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = kernels.Stream(3, 1, np.arange(700, dtype=np.uint64).reshape(7, 100))
    whole = stream.words(11)
    assert whole.shape == (7, 100, 11)
    monkeypatch.setattr(kernels, "PHILOX_BLOCK", 16)
    assert np.array_equal(stream.words(11), whole)
    monkeypatch.setattr(kernels, "BLOCKS_PER_SETUP", 0)
    assert np.array_equal(stream.words(11), whole)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 5), (1000, 1004), (0.1, 0.3)])
def test_uniform_is_one_rounding_of_float64_arithmetic(
    dtype: np.dtype, low: float, high: float
) -> None:
    drawn = per_replica(lambda: gpusim.rng(9, "i").uniform(40, low, high, dtype), 3)
    assert drawn.dtype == dtype
    first, last = (float(rounded(Fraction(bound), dtype)) for bound in (low, high))
    for replica in range(3):
        for ours, drew in zip(drawn[replica], philox_words(9, 0, replica, 40), strict=True):
            exact = first + (drew >> 11) * 2.0**-53 * (last - first)
            expected = rounded(Fraction(exact), dtype)
            if expected >= dtype.type(last):
                expected = np.nextafter(dtype.type(last), dtype.type(-np.inf))
            assert ours == expected


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_uniform_reaches_low_and_never_high(dtype: np.dtype) -> None:
    words = np.array([0, WORD - 1], np.uint64)
    for low, high in ((0, 1), (-1, 0), (16, 17), (-(2.0**-14), 0), (1, 1.0078125)):
        bounds = np.array([low, high]).astype(dtype)
        least, most = kernels.uniform(words, *bounds, dtype)
        assert least == bounds[0] and most < bounds[1]
        if high:  # near zero the numbers are denser than u
            assert most == np.nextafter(bounds[1], dtype.type(-np.inf))


@few
@given(st.integers(-128, 127), st.integers(1, 256), word, st.integers(1, 9))
def test_integers_are_lemires(low: int, width: int, seed: int, count: int) -> None:
    high = min(low + width, 128)
    drawn = per_replica(lambda: gpusim.rng(seed, "i").integers(low, high, count, np.int8), 2)
    expected = [[integer_of(seed, 0, r, e, low, high) for e in range(count)] for r in range(2)]
    assert drawn.tolist() == expected and drawn.dtype == np.int8


@pytest.mark.parametrize(
    "width", [1, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**63 + 1, WORD // 3 * 2, WORD]
)
def test_integers_of_wide_ranges_are_drawn_again_until_they_fit(width: int) -> None:
    drawn = per_replica(lambda: gpusim.rng(2, "i").integers(0, width, (3, 4), np.uint64), 3)
    expected = [[integer_of(2, 0, r, e, 0, width) for e in range(12)] for r in range(3)]
    assert drawn.reshape(3, 12).tolist() == expected


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_cover_the_whole_dtype(dtype: np.dtype) -> None:
    info = np.iinfo(dtype)
    low, high = int(info.min), int(info.max) + 1
    drawn = per_replica(lambda: gpusim.rng(4, "i").integers(low, high, 5, dtype), 2)
    expected = [[integer_of(4, 0, r, e, low, high) for e in range(5)] for r in range(2)]
    assert drawn.dtype == dtype and drawn.tolist() == expected
    for edge in (low, high - 1):
        alone = per_replica(lambda e=edge: gpusim.rng(4, "i").integers(e, e + 1, 5, dtype), 2)
        assert (alone == edge).all()


@few
@given(st.floats(0, 1), word)
def test_bernoulli_compares_the_word_with_p(p: float, seed: int) -> None:
    drawn = per_replica(lambda: gpusim.rng(seed, "i").bernoulli(p, 8), 2)
    threshold = math.floor(Fraction(p) * WORD)
    expected = [[drew < threshold for drew in philox_words(seed, 0, r, 8)] for r in range(2)]
    assert drawn.tolist() == expected


def test_bernoulli_of_0_and_1_is_certain() -> None:
    words = np.array([0, 1, WORD - 1], np.uint64)
    assert not kernels.bernoulli(words, np.zeros(1)).any()
    assert kernels.bernoulli(words, np.ones(1)).all()
    assert kernels.bernoulli(words, np.array([2.0**-64])).tolist() == [True, False, False]


@few
@given(st.integers(0, 40), word)
def test_permutations_sort_the_words(n: int, seed: int) -> None:
    drawn = per_replica(lambda: gpusim.rng(seed, "i").permutation(n), 3)
    assert drawn.shape == (3, n) and drawn.dtype == np.int64
    for replica in range(3):
        words = philox_words(seed, 0, replica, n)
        assert drawn[replica].tolist() == sorted(range(n), key=words.__getitem__)


def test_equal_words_are_ordered_by_the_next_candidates() -> None:
    class Tied(kernels.Stream):
        def words(self, count: int, candidate: int = 0) -> np.ndarray:
            assert count == 4
            rows = [[[5, 3, 5, 0], [1, 2, 3, 4]], [[9, 8, 7, 6], [4, 3, 2, 1]]][candidate]
            return np.array(rows, np.uint64)

    order = kernels.permutation(Tied(0, 0, np.zeros(2, np.uint64)), 4)
    assert order.tolist() == [[3, 1, 2, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_permutation_of_an_array_moves_whole_slices(axis: int) -> None:
    table = np.arange(3 * 5 * 7).reshape(3, 5, 7)

    def f(x: Any) -> Any:
        generator = gpusim.rng(0, "i")
        moved = generator.permutation(x, axis=axis)
        generator.calls = 0
        return moved, generator.permutation(x.shape[axis])

    moved, order = gpusim.vmap(f, axis_name="i")(table)
    for replica in range(3):
        assert np.array_equal(moved[replica], table[replica].take(order[replica], axis=axis))
    for ours, theirs in zip(gpusim.pmap(f, "i")(table), (moved, order), strict=True):
        assert_same_bits(ours, theirs)


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
    """The quantile in Python's floats, of which each operation is IEEE's."""

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


# --- shapes, dtypes, parameters -----------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), 0, 1, 3, (5,), [7, 1], (3, 0, 2), np.int64(4), (1, 3, 5)])
def test_shapes_are_one_replicas(shape: Any) -> None:
    expected = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)

    def f() -> Any:
        g = gpusim.rng(0, "i")
        return (
            g.uniform(shape),
            g.normal(shape),
            g.integers(9, shape=shape),
            g.bernoulli(0.5, shape),
        )

    for kind in MAPS:
        for drawn in nested((kind,), (("i", 3),))(f):
            assert drawn.shape == (3, *expected)


def test_defaults_are_one_number_of_float32_and_int64() -> None:
    def f() -> Any:
        g = gpusim.rng(0, "i")
        return g.uniform(), g.normal(), g.integers(5), g.bernoulli(), g.permutation(0)

    drawn = nested(("pmap",), (("i", 2),))(f)
    assert [d.dtype.name for d in drawn] == ["float32", "float32", "int64", "bool", "int64"]
    assert [d.shape for d in drawn] == [(2,)] * 4 + [(2, 0)]


def test_without_a_shape_parameters_give_it() -> None:
    def f(p: Any, low: Any) -> Any:
        g = gpusim.rng(0, "i")
        return g.bernoulli(p), g.uniform(low=low, high=[[2], [3]]), g.normal(mean=low)

    p, low = np.full((3, 4), 0.5), np.zeros((3, 5))
    for kind in MAPS:
        drawn = MAPS[kind](f, axis_name="i")(p, low)
        assert [d.shape for d in drawn] == [(3, 4), (3, 2, 5), (3, 5)]


def test_parameters_may_be_mapped_over_any_axis() -> None:
    width = np.arange(1, 7).reshape(2, 3) * 1000

    def f(width: Any) -> Any:
        g = gpusim.rng(0, "x")
        return (
            g.integers(-width, width, 4, np.int32),
            g.integers(
                0, np.uint64(2**62) * width.astype(np.uint64) // 1000 + np.uint64(1), 3, "u8"
            ),
            g.uniform(4, high=width),
            g.normal((4, 2), mean=width, std=width / 7, dtype="float64"),
            g.bernoulli(width / 6000, 4),
        )

    width[:, 2] = 3000  # 2**62 * 3 at most
    width[1] = width[0]
    reference = gpusim.pmap(gpusim.pmap(f, "y"), "x")(width)
    for outer, inner in itertools.product(MAPS.values(), repeat=2):
        drawn = outer(inner(f, axis_name="y"), axis_name="x")(width)
        for ours, theirs in zip(drawn, reference, strict=True):
            assert_same_bits(ours, theirs)


def test_draws_go_on_through_collectives() -> None:
    def f() -> Any:
        g = gpusim.rng(0, "i")
        return lax.psum(g.normal(3), "i"), lax.all_gather(g.integers(10), "i"), g.calls

    reference = nested(("vmap",), (("i", 5),))(f)
    for kind in MAPS:
        for ours, theirs in zip(nested((kind,), (("i", 5),))(f), reference, strict=True):
            assert_same_bits(ours, theirs)


# --- counting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAPS)
def test_a_generator_goes_on_from_map_to_map(kind: str) -> None:
    generator = gpusim.rng(0, "i")
    run = nested((kind,), (("i", 3),))
    first, second = (run(lambda: generator.integers(2**60, shape=3)) for _ in range(2))
    assert generator.calls == 2
    assert (first != second).all()
    fresh = gpusim.rng(0, "i", calls=1)
    assert_same_bits(run(lambda: fresh.integers(2**60, shape=3)), second)


@pytest.mark.parametrize("kind", MAPS)
def test_a_generator_goes_on_from_nest_to_nest(kind: str) -> None:
    def program(kinds: tuple[str, str]) -> Any:
        g = gpusim.rng(0, ("x", "y"))
        draw = partial(g.integers, 2**60)

        def f() -> Any:
            gx = gpusim.rng(1, "x", calls=4)
            inner = [MAPS[kinds[1]](lambda: draw(), axis_name="y", axis_size=3)() for _ in range(2)]
            return inner, gx.integers(2**60), gx.integers(2**60), g.calls, gx.calls

        maps = [MAPS[kinds[0]](f, axis_name="x", axis_size=2)() for _ in range(2)]
        assert g.calls == 4
        return maps

    reference = optree.tree_leaves(program(("vmap", "vmap")))
    for other in MAPS:
        for ours, theirs in zip(optree.tree_leaves(program((kind, other))), reference, strict=True):
            assert_same_bits(ours, theirs)


@pytest.mark.parametrize("schedule", ["cores", "one"])
def test_pmaps_replicas_count_for_themselves_and_the_largest_count_goes_on(schedule: str) -> None:
    generator = gpusim.rng(0, "i", calls=10)

    def f(times: Any) -> Any:
        before = generator.calls
        for _ in range(int(times)):
            generator.uniform()
        return before, generator.calls

    mapped = gpusim.pmap(f, "i", schedule=schedule)
    before, after = mapped(np.array([0, 3, 1, 7, 2, 0, 5]))
    assert before.tolist() == [10] * 7 and after.tolist() == [10, 13, 11, 17, 12, 10, 15]
    assert generator.calls == 17
    before, after = mapped(np.array([1, 0]))
    assert before.tolist() == [17, 17] and after.tolist() == [18, 17]
    assert generator.calls == 18


@pytest.mark.parametrize("kind", MAPS)
def test_calls_can_be_set_inside_a_map(kind: str) -> None:
    generator = gpusim.rng(0, "i", calls=40)

    def f() -> Any:
        first = generator.integers(2**60)
        generator.calls = 40
        again = generator.integers(2**60)
        generator.calls = 5
        return first, again, generator.calls

    first, again, calls = nested((kind,), (("i", 3),))(f)
    assert np.array_equal(first, again) and calls.tolist() == [5, 5, 5]
    assert generator.calls == 5


def test_a_pmap_that_fails_leaves_a_usable_generator() -> None:
    generator = gpusim.rng(0, "i")

    def f(x: Any) -> Any:
        generator.normal()
        if x == 1:
            raise RuntimeError("broken")
        return lax.psum(x, "i")

    with pytest.raises(gpusim.ReplicaError):
        gpusim.pmap(f, "i")(np.arange(3))
    assert generator.calls == 1
    gpusim.pmap(f, "i")(np.arange(4) + 2)
    assert generator.calls == 2


def test_maps_in_several_threads_start_from_the_same_count() -> None:
    generator = gpusim.rng(0, "i")
    together = threading.Barrier(2, timeout=PATIENCE)
    results: list[Any] = []

    def job() -> None:
        def f() -> Any:
            first = generator.integers(2**60)
            together.wait() if lax.axis_index("i") == 0 else None
            return first, generator.integers(2**60)

        results.append(gpusim.pmap(f, "i", axis_size=3)())

    threads = [threading.Thread(target=job) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, theirs in zip(*results, strict=True):
        assert_same_bits(ours, theirs)
    assert generator.calls == 2


def test_threads_of_a_replicas_own_are_refused() -> None:
    generator = gpusim.rng(0, "i")
    seen: list[str] = []

    def draw() -> None:
        try:
            generator.uniform()
        except RuntimeError as error:
            seen.append(str(error))

    def f() -> Any:
        thread = threading.Thread(target=contextvars.copy_context().run, args=(draw,))
        thread.start()
        thread.join()
        return generator.uniform()

    gpusim.pmap(f, "i", axis_size=2)()
    assert len(seen) == 2 and "the replica's own thread" in seen[0]


# --- state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis_name", ["i", ("i",), 7.5])
@pytest.mark.parametrize("kind", MAPS)
def test_a_saved_state_resumes_exactly(kind: str, axis_name: Any) -> None:
    bound = axis_name[0] if isinstance(axis_name, tuple) else axis_name
    run = nested((kind,), ((bound, 3),))

    def session(generator: gpusim.rng) -> Any:
        return [run(lambda: generator.normal(5)), run(lambda: generator.permutation(5))]

    generator = gpusim.rng(WORD - 1, axis_name)
    session(generator)
    saved = json.dumps(generator.state)
    expected = session(generator)
    for restored in (
        gpusim.rng.from_state(json.loads(saved)),
        pickle.loads(pickle.dumps(gpusim.rng.from_state(json.loads(saved)))),
        copy.deepcopy(gpusim.rng.from_state(json.loads(saved))),
        eval(repr(gpusim.rng.from_state(json.loads(saved))), {"rng": gpusim.rng}),
    ):
        assert json.dumps(restored.state) == saved
        for ours, theirs in zip(session(restored), expected, strict=True):
            assert_same_bits(ours, theirs)


def test_a_copy_counts_for_itself() -> None:
    generator = gpusim.rng(0, "i", calls=2)
    twin = copy.copy(generator)
    per_replica(lambda: twin.uniform(), 2)
    assert (generator.calls, twin.calls) == (2, 3)


def test_repr_and_state_show_what_there_is() -> None:
    generator = gpusim.rng(np.uint64(3), ["x", "y"], calls=4)
    assert repr(generator) == "rng(seed=3, axis_name=('x', 'y'), calls=4)"
    assert generator.state == {"seed": 3, "axis_name": ["x", "y"], "calls": 4}
    assert (generator.seed, generator.axis_name) == (3, ("x", "y"))


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "axis_name", "calls", "error", "message"),
    [
        (-1, "i", 0, ValueError, "seed=-1: expected an integer from 0 to 2**64 - 1"),
        (WORD, "i", 0, ValueError, "seed="),
        (0.5, "i", 0, TypeError, "seed=0.5: expected an integer"),
        ("0", "i", 0, TypeError, "seed='0': expected an integer"),
        (None, "i", 0, TypeError, "seed=None"),
        (0, "i", -1, ValueError, "calls=-1"),
        (0, "i", 1.0, TypeError, "calls=1.0"),
        (0, None, 0, ValueError, "axis_name=None: expected an axis name"),
        (0, (), 0, ValueError, "axis_name=()"),
        (0, ("i", "i"), 0, ValueError, "twice"),
        (0, ("i", 0), 0, ValueError, "not positions"),
        (0, {"i": 1}, 0, TypeError, "hashable"),
    ],
)
def test_bad_generators_are_refused(
    seed: Any, axis_name: Any, calls: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        gpusim.rng(seed, axis_name, calls=calls)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ([0, "i", 0], TypeError, "must be a mapping"),
        ({"seed": 0, "axis_name": "i"}, ValueError, "must have the keys ['axis_name', 'calls'"),
        ({"seed": 0, "axis_name": "i", "calls": 0, "key": 1}, ValueError, "must have the keys"),
        ({"seed": 0, "axis_name": "i", "calls": -3}, ValueError, "calls=-3"),
    ],
)
def test_bad_states_are_refused(state: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        gpusim.rng.from_state(state)


BAD_DRAWS: list[tuple[Callable[[gpusim.rng], Any], type[Exception], str]] = [
    (lambda g: g.uniform(-1), ValueError, "uniform shape -1"),
    (lambda g: g.uniform((2, 1.5)), TypeError, "uniform shape 1.5: expected an integer"),
    (lambda g: g.normal("3"), TypeError, "normal shape '3'"),
    (lambda g: g.normal(True), TypeError, "normal shape True"),
    (lambda g: g.uniform(3, [0, 0], 1), ValueError, "cannot be broadcast to shape=(3,)"),
    (lambda g: g.uniform(None, [0, 0], [1, 1, 1]), ValueError, "do not broadcast"),
    (lambda g: g.uniform((), 1, 1), ValueError, "uniform low must be less than high in float32"),
    (lambda g: g.uniform((), 1, 1 + 1e-9), ValueError, "low must be less than high in float32"),
    (lambda g: g.uniform((), [0, 2], [1, 1]), ValueError, "low must be less than high"),
    (lambda g: g.uniform((), 0, np.nan), ValueError, "uniform high=nan: expected finite numbers"),
    (lambda g: g.uniform((), 0, 1e5, "float16"), ValueError, "finite numbers of float16"),
    (lambda g: g.uniform((), -1e308, 1e308, float), ValueError, "range too large"),
    (lambda g: g.uniform((), 0, 1j), TypeError, "uniform high=1j: expected real numbers"),
    (lambda g: g.uniform((), "a"), TypeError, "uniform low='a': expected real numbers"),
    (lambda g: g.uniform(dtype=np.int32), TypeError, "expected one of float16, bfloat16"),
    (lambda g: g.normal(dtype="floaty"), TypeError, "normal dtype='floaty': expected one of"),
    (lambda g: g.normal(dtype=None), TypeError, "normal dtype=None"),
    (lambda g: g.normal(dtype=np.complex64), TypeError, "normal dtype="),
    (lambda g: g.normal(std=-1), ValueError, "normal std must not be negative, but got -1"),
    (lambda g: g.normal(mean=np.inf), ValueError, "normal mean=inf: expected finite numbers"),
    (lambda g: g.integers(0), ValueError, "integers low must be less than high, but got low=0"),
    (lambda g: g.integers(5, 5), ValueError, "integers low must be less than high"),
    (lambda g: g.integers(np.array([1, 9]), 5), ValueError, "low must be less than high"),
    (lambda g: g.integers(0, 257, dtype="uint8"), ValueError, "expected integers from 1 to 256"),
    (lambda g: g.integers(-1, 5, dtype="uint8"), ValueError, "expected integers from 0 to 255"),
    (lambda g: g.integers(2**64, dtype=np.int64), ValueError, "integers high=18446744073709551616"),
    (lambda g: g.integers(1.0, 5), TypeError, "integers low=1.0: expected integers"),
    (lambda g: g.integers(True), TypeError, "integers high=True: expected integers"),
    (lambda g: g.integers(5, dtype=np.float32), TypeError, "integers dtype="),
    (lambda g: g.integers(5, dtype=bool), TypeError, "integers dtype="),
    (lambda g: g.bernoulli(1.5), ValueError, "bernoulli p must be from 0 to 1, but got 1.5"),
    (lambda g: g.bernoulli(-0.1), ValueError, "bernoulli p must be"),
    (lambda g: g.bernoulli([0.5, np.nan]), ValueError, "bernoulli p must be"),
    (lambda g: g.bernoulli(None), TypeError, "bernoulli p=None: expected real numbers"),
    (lambda g: g.permutation(-1), ValueError, "permutation of -1"),
    (lambda g: g.permutation(2.0), TypeError, "permutation of 2.0: expected an integer"),
    (lambda g: g.permutation(3, axis=1), ValueError, "axis 1 is out of bounds"),
    (lambda g: g.permutation(np.zeros((2, 3)), 2), ValueError, "axis 2 is out of bounds"),
    (lambda g: g.permutation(g.integers(5)), TypeError, "is mapped over 'i'"),
]


@pytest.mark.parametrize(("draw", "error", "message"), BAD_DRAWS)
def test_bad_draws_are_refused_and_not_counted(
    draw: Callable[[gpusim.rng], Any], error: type[Exception], message: str
) -> None:
    generator = gpusim.rng(0, "i")
    with pytest.raises(error, match=re.escape(message)):
        per_replica(lambda: draw(generator), 2)
    assert generator.calls == (1 if "is mapped" in message else 0)


@pytest.mark.parametrize("kind", MAPS)
def test_an_axis_that_is_not_bound_is_a_name_error(kind: str) -> None:
    generator = gpusim.rng(0, "j")
    with pytest.raises(NameError, match="unbound axis name: 'j'"):
        nested((kind,), (("i", 2),))(generator.uniform)
    with pytest.raises(NameError, match="no axis is bound here"):
        generator.permutation(3)
    assert generator.calls == 0


def test_calls_out_of_range_are_refused() -> None:
    generator = gpusim.rng(0, "i", calls=WORD - 1)
    with pytest.raises(ValueError, match="calls=-1"):
        generator.calls = -1
    per_replica(generator.uniform, 2)  # the last there is
    with pytest.raises(ValueError, match="calls=18446744073709551616"):
        per_replica(generator.uniform, 2)
