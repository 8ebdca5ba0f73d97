"""Any format: what a Format is, and that the general route has the bits of the narrow dtypes'."""

from __future__ import annotations

import copy
import pickle
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpusim
from gpusim import Format, Reduction, lax, quantise_fpx, round_to
from gpusim.fallback import fold
from gpusim.fallback import round_to as round_kernel
from tests.contract.fold_limits import fold_limits
from tests.oracles.reference_fold import Float, Number, lane, round_number

NARROW = {
    "float16": Format(5, 10),
    "bfloat16": Format(8, 7),
    "float8_e5m2": Format(5, 2),
    "float8_e4m3fn": Format(4, 3, has_infinities=False),
    "float8_e5m2fnuz": Format(5, 2, bias=16, has_infinities=False, has_negative_zero=False),
    "float8_e4m3fnuz": Format(4, 3, bias=8, has_infinities=False, has_negative_zero=False),
}
E3M2 = Format(3, 2, has_infinities=False, high_nans=0)
BOTH = ["nearest", "stochastic"]
ORDERS = ["linear", "reverse", "tree", "ring", "exact"]


def narrow(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def assert_same(left: np.ndarray, right: np.ndarray) -> None:
    """Equal values with equal signs; NaNs are equal to each other."""
    left, right = left.astype(np.float64), right.astype(np.float64)
    nans = np.isnan(left)
    np.testing.assert_array_equal(nans, np.isnan(right))
    np.testing.assert_array_equal(left, right)
    np.testing.assert_array_equal(np.signbit(left[~nans]), np.signbit(right[~nans]))


@np.errstate(all="ignore")
def hard_values(general: Format, source: str, count: int = 4000) -> np.ndarray:
    """Values of all the format's sizes, its own values, midpoints, what lies beside, specials."""
    random = np.random.default_rng(5)
    low, high = np.log2(general.smallest) - 3, np.log2(general.max) + 2
    values = np.exp2(random.uniform(low, high, count)) * random.choice([-1.0, 1.0], count)
    own = round_kernel(values, general.info).astype(np.float64)
    middles = own * (1 + 2.0 ** -(general.mantissa_bits + 1))
    edges = np.array([general.max, general.smallest, general.smallest / 2])
    top = general.max * (1 + np.arange(1, 9) * 2.0 ** -(general.mantissa_bits + 2))
    points = np.concatenate([own, middles, edges, top, -edges])
    beside = [np.nextafter(points.astype(source), s * np.inf, dtype=source) for s in (-1, 1)]
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e300, -1e-300]
    return np.concatenate([values, points, *beside, special]).astype(source)


# The general route beside the fast one.


@pytest.mark.parametrize("rounding", BOTH)
@pytest.mark.parametrize("source", ["float32", "float64", "float16"])
@pytest.mark.parametrize("name", NARROW)
def test_a_format_rounds_as_the_dtype_that_it_describes(
    name: str, source: str, rounding: str
) -> None:
    x = hard_values(NARROW[name], source)
    general = round_to(x, NARROW[name], rounding=rounding, seed=7)
    assert general.dtype == np.float32
    assert_same(general, round_to(x, narrow(name), rounding=rounding, seed=7))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NARROW)
def test_a_format_accumulates_as_the_dtype_that_it_describes(name: str, order: str) -> None:
    random = np.random.default_rng(11)
    scale = NARROW[name].max / 6  # some sums overflow
    for source in ("float32", "float64", "float16", name):
        x = random.normal(size=(9, 3, 21)) * scale * 2.0 ** random.integers(-30, 1, (9, 3, 21))
        x[random.random(x.shape) < 0.02] = -0.0
        with np.errstate(over="ignore"):
            x = x.astype(narrow(source))
        for rounding in BOTH:
            for op in ("sum", "prod")[: 1 if order == "exact" else 2]:
                options: dict[str, Any] = {
                    "op": op,
                    "order": order,
                    "rounding": rounding,
                    "seed": 3,
                    "call": 2,
                    "batch_ndim": 1,
                    "places": np.arange(3),
                    "divisor": 9,
                }
                general = fold(x, accumulate=NARROW[name].info, **options)
                assert general.dtype == x.dtype
                assert_same(general, fold(x, accumulate=narrow(name), **options))


def test_the_formats_of_float32_and_float64_are_these_types() -> None:
    x = np.random.default_rng(1).normal(size=(5, 40)) * 2.0**20
    for wide, dtype in ((Format(8, 23), np.float32), (Format(11, 52), np.float64)):
        assert wide.carrier == dtype
        for rounding in BOTH:  # not narrower than float32: always to nearest
            assert_same(round_to(x, wide, rounding=rounding), x.astype(dtype))
            assert_same(fold(x, accumulate=wide.info, rounding=rounding), fold(x, accumulate=dtype))


def test_complex_values_are_two_reals_to_a_format_too() -> None:
    x = np.random.default_rng(1).normal(size=(5, 40)).astype(np.float32).view(np.complex64)
    for op in ("sum", "prod"):
        general = fold(x, op=op, accumulate=Format(5, 10).info, rounding="stochastic")
        fast = fold(x, op=op, accumulate=np.float16, rounding="stochastic")
        assert_same(general.view(np.float32), fast.view(np.float32))


def test_integers_and_selections_do_not_mind_a_format() -> None:
    x = np.arange(12).reshape(3, 4) * 1001
    assert (fold(x, accumulate=E3M2.info) == x.sum(axis=0)).all()
    y = x.astype(np.float32)
    assert (fold(y, op="max", accumulate=E3M2.info) == y[-1]).all()


@pytest.mark.parametrize("order", ORDERS)
def test_bits_do_not_depend_on_the_blocks(order: str) -> None:
    x = np.random.default_rng(3).normal(size=(9, 2, 37)).astype(np.float32)
    options: dict[str, Any] = {"rounding": "stochastic", "seed": 1, "batch_ndim": 1}
    for target in (E3M2.info, np.float16):
        whole = fold(x, order=order, accumulate=target, **options)
        cast = round_kernel(x, target, **options)
        for block, rows in ((1, 0), (5, 0), (24, 1 << 40), (100, 1 << 40)):
            with fold_limits(BLOCK=block, ROW_WIDTH=rows, ROW_MEMBERS=1):
                assert_same(whole, fold(x, order=order, accumulate=target, **options))
                assert_same(cast, round_kernel(x, target, **options))


# The general route against exact arithmetic.


@settings(max_examples=150, deadline=None)
@given(
    st.integers(2, 8),
    st.integers(1, 20),
    st.sampled_from(["ieee", "fn", "fnuz"]),
    st.sampled_from(["float32", "float64"]),
    st.integers(0, 2**64 - 1),
    st.sampled_from(BOTH),
)
def test_any_format_is_rounded_to_as_the_contract_says(
    exponent_bits: int, mantissa_bits: int, style: str, source: str, seed: int, rounding: str
) -> None:
    fmt = Float(exponent_bits, mantissa_bits, style)
    general = Format(
        exponent_bits,
        mantissa_bits,
        bias=fmt.bias,
        has_infinities=style == "ieee",
        has_negative_zero=style != "fnuz",
    )
    assert general.max == fmt.largest and general.bits == fmt.bits
    x = np.random.default_rng(seed).choice(hard_values(general, source, 50), 40)
    result = round_to(x, general, rounding=rounding, seed=seed)
    for index, (value, found) in enumerate(zip(x.tolist(), result.tolist(), strict=True)):
        magnitude = abs(Fraction(value)) if np.isfinite(value) else f"{abs(value)}"
        drawn = lane(seed, 1, 0, 0, index) if rounding == "stochastic" else None
        expected = round_number(Number(bool(np.signbit(value)), magnitude), fmt, drawn)
        if isinstance(expected.magnitude, str):
            assert str(abs(found)) == expected.magnitude
        else:
            assert Fraction(found) == expected.value
            assert bool(np.signbit(found)) == expected.negative


def test_float64_is_rounded_once() -> None:
    x = 1 + 2.0**-8 + 2.0**-40
    assert round_to(x, ml_dtypes.bfloat16) == round_to(x, Format(8, 7)) == 1 + 2.0**-7


def test_without_subnormals_zero_and_the_smallest_are_neighbours() -> None:
    flushed = Format(4, 2, bias=7, has_subnormals=False)
    small = flushed.smallest
    assert small == 2.0**-7 * 1.25
    x = small * np.array([0.25, 0.5, 0.51, 0.9, 1.0, 1.6, -0.75])
    expected = [0, 0, small, small, small, 1.6 * small, -small]
    assert round_to(x, flushed).tolist() == expected
    share = 0.3
    drawn = round_to(np.full(100_000, share * small), flushed, rounding="stochastic", seed=4)
    assert set(np.unique(drawn)) == {0.0, small}
    assert abs(np.mean(drawn > 0) - share) < 5 * (share * (1 - share) / drawn.size) ** 0.5


def test_beyond_the_largest_there_is_infinity_or_nan() -> None:
    x = np.array([1e9, -1e9, np.inf, -np.inf])
    assert round_to(x, Format(4, 3)).tolist() == [np.inf, -np.inf, np.inf, -np.inf]
    for without in (E3M2, Format(4, 3, has_infinities=False)):
        assert np.isnan(round_to(x, without)).all()
    unsigned = Format(4, 3, is_signed=False)
    assert_same(
        round_to(np.array([-1.0, -np.inf, -0.0, -1e-30, np.inf, 2.0]), unsigned),
        np.array([np.nan, np.nan, 0.0, 0.0, np.inf, 2.0]),
    )
    fixed = Format(0, 7, has_infinities=False, is_twos_complement=True)
    assert (fixed.min, fixed.max) == (-2.0, 2 - 2.0**-6)
    assert_same(
        round_to(np.array([-2.0, -2.007, -2.02, 1.99, 2.0, -0.001]), fixed),
        np.array([-2.0, -2.0, np.nan, 1.984375, np.nan, 0.0]),
    )


def test_values_are_held_in_float64_where_float32_is_too_small() -> None:
    for wide in (Format(8, 24), Format(9, 3), Format(8, 7, bias=150), Format(5, 10, bias=-120)):
        assert wide.carrier == np.float64
        x = np.array([wide.max, wide.smallest, -wide.smallest])
        assert round_to(x, wide).tolist() == x.tolist()
    x = np.float32([1, 2**-24, 2**-24])
    assert fold(x, accumulate=Format(8, 24).info, out_dtype=np.float64) == 1 + 2.0**-23


# The fields of a Format.


def test_formats_compare_by_their_fields_and_not_by_name() -> None:
    assert Format(5, 10) == Format(5, 10, bias=15, name="half")
    assert {Format(5, 10)} == {Format(np.int64(5), 10, has_negative_zero=True)}
    assert Format(5, 10) != Format(5, 10, bias=16)
    assert NARROW["float8_e4m3fn"] == Format(4, 3, has_infinities=False, high_nans=1)


@pytest.mark.parametrize(
    "general",
    [
        *NARROW.values(),
        E3M2,
        Format(8, 0, bias=128, high_nans=1, is_signed=False, name="unsigned"),
        Format(0, 7, has_infinities=False, is_twos_complement=True),
        Format(4, 3, has_subnormals=False),
    ],
    ids=repr,
)
def test_formats_and_their_reductions_survive_repr_pickle_and_copy(general: Format) -> None:
    for given_ in (general, Reduction("sum", "ring", general, "stochastic", 5)):
        assert eval(repr(given_)) == given_
        assert pickle.loads(pickle.dumps(given_)) == given_ == copy.deepcopy(given_)
        assert hash(copy.deepcopy(given_)) == hash(given_)


def test_limits_have_the_names_that_finfo_gives_them() -> None:
    for name, general in NARROW.items():
        limits_of = ml_dtypes.finfo(narrow(name))
        assert general.bits == limits_of.bits
        assert general.max == float(limits_of.max) and general.min == float(limits_of.min)
        assert general.eps == float(limits_of.eps)
        assert general.smallest == float(limits_of.smallest_subnormal)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((5.5, 2), {}, TypeError, "exponent_bits=5.5: expected an integer"),
        ((12, 2), {}, ValueError, "exponent_bits=12: expected 0 to 11"),
        ((5, 53), {}, ValueError, "mantissa_bits=53: expected 0 to 52"),
        ((5, -1), {}, ValueError, "mantissa_bits=-1"),
        ((5, 2), {"bias": "3"}, TypeError, "bias='3': expected an integer"),
        ((11, 52), {"bias": 1024}, ValueError, "float64 does not hold every value"),
        ((5, 2), {"bias": -1010}, ValueError, "float64 does not hold every value"),
        ((8, 0), {"has_subnormals": False}, ValueError, "has no zero"),
        ((2, 1), {"high_nans": 7}, ValueError, "high_nans=7: no finite value above zero"),
        ((2, 1), {"high_nans": -1}, ValueError, "high_nans=-1"),
        ((2, 1), {"is_signed": False, "has_negative_zero": True}, ValueError, "has_negative_zero"),
        ((3, 2), {"is_twos_complement": True}, ValueError, "is_twos_complement=True: expected"),
    ],
)
def test_what_is_no_format_is_named(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Format(*arguments, **options)


# Where a Format is taken.


def test_a_format_accumulates_under_every_executor() -> None:
    x = np.random.default_rng(2).normal(size=(4, 30)).astype(np.float32)
    results = []
    for run in (gpusim.vmap, gpusim.pmap):
        with gpusim.reduction(accumulate=E3M2, rounding="stochastic", seed=5) as state:
            results.append(run(lambda v: lax.psum(v, "i"), axis_name="i")(x))
            assert "accumulate=Format(3, 2" in repr(state)
    expected = fold(x, accumulate=E3M2.info, rounding="stochastic", seed=5)
    for result in results:
        assert result.dtype == np.float32
        assert_same(result, np.broadcast_to(expected, (4, 30)))
    given_ = Reduction(accumulate=E3M2, rounding="stochastic", seed=5)
    assert_same(gpusim.collectives.psum(x, reduction=given_).value, expected)
    scattered = gpusim.collectives.psum_scatter(x[:, :28], tiled=True, reduction=given_).value
    assert_same(scattered.reshape(-1), expected[:28])


def test_in_vmap_every_replica_is_rounded_as_it_would_be_alone() -> None:
    x = np.random.default_rng(4).normal(size=(3, 2, 5)).astype(np.float32)

    def f(v: Any) -> Any:
        return round_to(v, np.float16, rounding="stochastic", seed=9, axis_name=())

    alone = np.stack([f(v) for row in x for v in row]).reshape(x.shape)
    assert_same(gpusim.vmap(gpusim.vmap(f))(x), alone)
    assert_same(gpusim.vmap(gpusim.vmap(f), in_axes=1, out_axes=1)(x), alone)
    assert_same(gpusim.pmap(f)(x[:, 0]), alone[:, 0])
    assert (alone == f(x[0, 0])).sum() < alone.size
    same = np.full((4, 6), 0.3, np.float32)  # one seed, one index, one u on every replica
    assert (np.ptp(gpusim.vmap(f)(same), axis=0) == 0).all()


def test_in_vmap_values_without_a_mapped_axis_stay_without() -> None:
    def f(v: Any) -> Any:
        rounded = round_to(lax.psum(v, "i"), E3M2)
        assert rounded.mapped_axes == ()
        return rounded

    assert gpusim.vmap(f, axis_name="i", out_axes=None)(np.ones(7)) == 7


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (3, 4)])
def test_shapes_are_kept(shape: tuple[int, ...]) -> None:
    x = np.ones(shape, order="F")
    for target in (np.float16, E3M2):
        result = round_to(x, target, rounding="stochastic")
        assert result.shape == shape and result.flags.c_contiguous
    assert quantise_fpx(x, 2, 1).shape == shape
    assert gpusim.vmap(lambda v: round_to(v, E3M2))(np.ones((5, *shape))).shape == (5, *shape)


@pytest.mark.parametrize(
    ("x", "dtype", "options", "error", "message"),
    [
        (np.ones(2, int), "float16", {}, TypeError, "x: int64 given"),
        (1, E3M2, {}, TypeError, "x: int64 given"),
        (1.0, np.int8, {}, TypeError, "dtype: int8 given"),
        (1.0, None, {}, TypeError, "dtype=None"),
        (1.0, "half precision", {}, TypeError, "half precision"),
        (1.0, E3M2, {"rounding": "odd"}, ValueError, "rounding='odd'"),
        (1.0, E3M2, {"seed": -1}, ValueError, "seed=-1"),
        (1.0, E3M2, {"seed": 2**64}, ValueError, "seed="),
    ],
)
def test_what_cannot_be_rounded_is_named(
    x: Any, dtype: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        round_to(x, dtype, **options)


# quantise_fpx


def original(x: np.ndarray, exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """poptorch-experimental-addons' rounding to nearest, on the bits of float32."""
    top = 2 ** (exponent_bits - 1) - 1
    largest = np.float32(2.0**top * (2 - 2.0**-mantissa_bits))
    scale = np.float32(2.0 ** (126 - top))
    mask = np.int32(2 ** (23 - mantissa_bits) - 1)
    bits = (np.clip(x, -largest, largest) / scale).view(np.int32)
    return ((bits + mask // 2) & ~mask).view(np.float32) * scale


@pytest.mark.parametrize(
    ("exponent_bits", "mantissa_bits"), [(1, 3), (2, 1), (3, 0), (4, 3), (5, 2), (5, 10), (7, 22)]
)
def test_quantise_fpx_to_nearest_has_the_bits_of_the_original(
    exponent_bits: int, mantissa_bits: int
) -> None:
    format_ = Format(exponent_bits, mantissa_bits, bias=2 ** (exponent_bits - 1), high_nans=0,
                     has_infinities=False)  # fmt: skip
    x = hard_values(format_, "float32")
    x = x[~np.isnan(x)]
    found = quantise_fpx(x, exponent_bits, mantissa_bits, rounding="nearest")
    assert found.dtype == np.float32
    assert_same(found, original(x, exponent_bits, mantissa_bits))


def test_quantise_fpx_has_every_value_of_its_format() -> None:
    x, wide = np.linspace(-4, 4, 100), np.linspace(-10, 10, 1000)
    values = {0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3}
    assert set(np.abs(quantise_fpx(x, 2, 1, "nearest"))) == values
    assert set(np.abs(quantise_fpx(wide, 3, 0, "nearest"))) == {0, 0.125, 0.25, 0.5, 1, 2, 4, 8}
    assert quantise_fpx(np.float64([1e9, np.inf, -np.inf]), 5, 2).tolist() == [57344, 57344, -57344]
    top = float(np.finfo(np.float32).max)
    assert quantise_fpx(np.float32([top, -top]), 8, 23).tolist() == [top, -top]
    assert np.isnan(quantise_fpx(np.float32(np.nan), 3, 0))


def test_quantise_fpx_is_stochastic_by_default_and_keeps_the_dtype() -> None:
    for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16):
        x = np.full(10_000, -1.35, dtype)
        found = quantise_fpx(x, exponent_bits=2, mantissa_bits=1)
        assert found.dtype == dtype
        found = found.astype(float)
        assert set(found) == {-1.5, -1.0}
        share = (-float(x[0]) - 1) / 0.5
        assert abs(np.mean(found == -1.5) - share) < 5 * (share * (1 - share) / x.size) ** 0.5
    assert_same(
        gpusim.vmap(lambda v: quantise_fpx(v, 3, 2, seed=1, axis_name=()))(x.reshape(2, -1)),
        np.tile(quantise_fpx(x[:5000], 3, 2, seed=1), (2, 1)),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"exponent_bits": 9},
            r"quantise_fpx\(exponent_bits=9\) not supported, maximum number of exponent bits is 8",
        ),
        (
            {"mantissa_bits": 24},
            r"fpx\(mantissa_bits=24\) not supported, maximum number of mantissa bits is 23",
        ),
        ({"exponent_bits": 0}, r"exponent_bits=0\) not supported, minimum"),
        ({"mantissa_bits": -1}, r"mantissa_bits=-1\) not supported, minimum"),
        (
            {"rounding": "up"},
            r"Expected quantise\(rounding=\?\) to be 'nearest' or 'stochastic', actual 'up'",
        ),
    ],
)
def test_quantise_fpx_refuses_in_the_words_of_the_original(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        quantise_fpx(np.ones(2), **{"exponent_bits": 2, "mantissa_bits": 1, **options})
