"""Rounding beside gfloat, an independent implementation, with the same random bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gfloat
import ml_dtypes
import numpy as np
import pytest
from gfloat import Domain, FormatInfo, RoundMode
from gfloat import formats as known

import gpusim
from gpusim import Format, Reduction, round_to
from gpusim.fallback import fold
from tests.oracles.reference_fold import fold_element, lane, ring_start


def info(name: str, exponent_bits: int, mantissa_bits: int, **changes: Any) -> FormatInfo:
    """A format of IEEE's kind, or one that differs in a few fields."""
    fields: dict[str, Any] = {
        "bias": 2 ** (exponent_bits - 1) - 1,
        "is_signed": True,
        "domain": Domain.Extended,
        "has_nz": True,
        "num_high_nans": 2**mantissa_bits - 1,
        "has_subnormals": True,
        "is_twos_complement": False,
    }
    width = 1 + exponent_bits + mantissa_bits
    return FormatInfo(name, width, mantissa_bits + 1, **{**fields, **changes})


FNUZ: dict[str, Any] = {"domain": Domain.Finite, "has_nz": False, "num_high_nans": 0}
DTYPES = {
    "float16": known.format_info_binary16,
    "bfloat16": known.format_info_bfloat16,
    "float8_e5m2": known.format_info_ocp_e5m2,
    "float8_e4m3fn": known.format_info_ocp_e4m3,
    "float8_e5m2fnuz": info("e5m2fnuz", 5, 2, bias=16, **FNUZ),
    "float8_e4m3fnuz": info("e4m3fnuz", 4, 3, bias=8, **FNUZ),
}
ODD = [
    known.format_info_ocp_e3m2,
    known.format_info_ocp_e2m3,
    known.format_info_ocp_e2m1,
    known.format_info_ocp_int8,
    *known.p3109_binary8_formats,
    known.format_info_p3109(3, 2, gfloat.Signedness.Signed, Domain.Finite),
    info("e5m9", 5, 9),
    info("e6m11", 6, 11, bias=40),
    info("e8m15", 8, 15),
    info("e3m0", 3, 0, num_high_nans=0),
]
ALL = [*DTYPES.values(), *ODD]


def target_of(fmt: FormatInfo) -> Any:
    """gpusim's argument for a format: its dtype if it has one, else the FormatInfo."""
    for name, entry in DTYPES.items():
        if entry is fmt:
            return np.dtype(getattr(ml_dtypes, name, name))
    return fmt


def every_value(fmt: FormatInfo) -> np.ndarray:
    """All code points' values; of formats with more than 16 bits some."""
    codes = np.arange(0, 2**fmt.k, max(1, 2 ** (fmt.k - 16)))
    with np.errstate(all="ignore"):
        return gfloat.decode_ndarray(fmt, codes)


@np.errstate(all="ignore")
def hard_values(fmt: FormatInfo, dtype: type) -> np.ndarray:
    """Every value, every midpoint, quarters, their neighbours, and what lies outside."""
    values = np.unique(every_value(fmt))
    values = values[np.isfinite(values)]
    lower, upper = values[:-1], values[1:]
    points = np.concatenate([values, (lower + upper) / 2, lower * 0.75 + upper * 0.25])
    ulp = fmt.max - values[values < fmt.max].max()
    over = fmt.max + ulp * np.array([0.25, 0.5, 0.75, 1, 1.5, 100])
    points = np.concatenate([points, over, -over, [0.0, -0.0, np.inf, -np.inf, np.nan]])
    points = points.astype(dtype)
    beside = [np.nextafter(points, sign * np.inf, dtype=dtype) for sign in (-1, 1)]
    found = np.concatenate([points, *beside])
    if not fmt.is_signed:  # of negative values gfloat says nothing there
        found = found[~(found < 0)]
    return found


@np.errstate(all="ignore")
def expected(fmt: FormatInfo, x: np.ndarray, mode: RoundMode, **bits: Any) -> np.ndarray:
    """gfloat's result; NaN where it refuses, since the format has neither infinity nor NaN."""
    if fmt.num_nans or fmt.domain == Domain.Extended:
        return gfloat.round_ndarray(fmt, x, mode, **bits)
    saturated = gfloat.round_ndarray(fmt, x, mode, sat=True, **bits)
    roomy = FormatInfo(**{**vars(fmt), "k": fmt.k + 1, "bias": fmt.bias})
    free = gfloat.round_ndarray(roomy, x, mode, sat=True, **bits)
    return np.where(saturated == free, saturated, np.nan)


def assert_same(found: np.ndarray, wanted: np.ndarray) -> None:
    found, nans = found.astype(np.float64), np.isnan(wanted)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found[~nans]), np.signbit(wanted[~nans]))


def uniform(seed: int, count: int) -> np.ndarray:
    """The lanes of `round_to`, as the contract writes them down."""
    key, counter = np.array([seed, 0], np.uint64), np.array([0, 1, 0, 0], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(-(-count // 2))
    return words.view(np.uint32)[:count].astype(np.int64)


@pytest.mark.parametrize("fmt", ALL, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nearest_is_gfloats_ties_to_even(fmt: FormatInfo, dtype: type) -> None:
    x = hard_values(fmt, dtype)
    wanted = expected(fmt, x.astype(np.float64), RoundMode.TiesToEven)
    assert_same(round_to(x, target_of(fmt)), wanted)
    assert_same(round_to(x, fmt), wanted)


@pytest.mark.parametrize("fmt", ALL, ids=str)
@pytest.mark.parametrize("seed", [0, 2**63 + 11])
def test_stochastic_is_gfloats_stochastic_fastest(fmt: FormatInfo, seed: int) -> None:
    x = hard_values(fmt, np.float32)  # of float64 gfloat's own addition would be rounded
    x = np.concatenate([x, np.random.default_rng(seed).normal(size=4000).astype(np.float32)])
    x = np.abs(x) if not fmt.is_signed else x
    bits = {"srbits": 2**32 - 1 - uniform(seed, x.size), "srnumbits": 32}
    wanted = expected(fmt, x.astype(np.float64), RoundMode.StochasticFastest, **bits)
    for target in (target_of(fmt), fmt):
        assert_same(round_to(x, target, rounding="stochastic", seed=seed), wanted)


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_every_value_of_a_format_is_kept(fmt: FormatInfo) -> None:
    x = every_value(fmt)
    for rounding in ("nearest", "stochastic"):
        assert_same(round_to(x, fmt, rounding=rounding), x)
        assert_same(round_to(x, target_of(fmt), rounding=rounding), x)


def test_a_format_has_the_limits_of_its_info() -> None:
    for fmt in [*ALL, *known.sample_formats]:
        if not fmt.has_zero:
            continue
        ours = Format.from_gfloat(fmt)
        assert (ours.max, ours.min, ours.smallest) == (fmt.max, fmt.min, fmt.smallest)
        assert (ours.bits, ours.precision, ours.name) == (fmt.k, fmt.precision, fmt.name)


def test_formats_without_subnormals_have_gfloats_values() -> None:
    fmt = info("flushed", 3, 2, has_subnormals=False)
    values = np.unique(every_value(fmt))
    values = values[(values > 0) & np.isfinite(values)]
    assert Format.from_gfloat(fmt).smallest == values[0] == fmt.smallest
    assert_same(round_to(values, fmt), values)
    middles = (values[:-1] + values[1:]) / 2
    assert_same(round_to(np.nextafter(middles, 0), fmt), values[:-1])
    assert_same(round_to(np.nextafter(middles, 99), fmt), values[1:])


@pytest.mark.parametrize("order", ["linear", "reverse", "tree", "ring"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(
    "name", ["binary16", "bfloat16", "ocp_e3m2", "ocp_e2m3", "p3109_k8p3se", "e5m9", "e3m0"]
)
def test_folds_in_a_format_round_every_step_as_gfloat(name: str, rounding: str, order: str) -> None:
    fmt = next(fmt for fmt in ALL if fmt.name == name)
    members, seed, call, place = 6, 3, 2, 5
    x = np.random.default_rng(8).normal(size=(members, 7)).astype(np.float32)
    x *= np.float32(fmt.max / 16 if fmt.max < 1e4 else 1)

    def rounded(value: float, step: int, index: int) -> float:
        if rounding == "nearest":
            return gfloat.round_float(fmt, value)
        bits = 2**32 - 1 - lane(seed, step, call, place, index)
        return gfloat.round_float(fmt, value, RoundMode.StochasticFastest, False, bits, 32)

    totals = []
    for index in range(x.shape[1]):

        def apply(left: Any, right: Any, step: int, index: int = index) -> Any:
            added = np.float32(left[0]) + np.float32(right[0])
            return (rounded(float(added), step, index),)

        start = ring_start((index,), (7,), members, None) if order == "ring" else 0
        column: list[Any] = [(value,) for value in x[:, index]]
        totals.append(float(fold_element(column, order, start, apply)[0]))
    options: dict[str, Any] = {"rounding": rounding, "seed": seed, "call": call, "order": order}
    found = fold(x, accumulate=Format.from_gfloat(fmt).info, places=place, **options)
    assert found.tolist() == totals


def test_a_format_info_serves_as_accumulator() -> None:
    fmt = known.format_info_ocp_e3m2
    how = Reduction(accumulate=fmt)
    assert how == Reduction(accumulate=Format(3, 2, has_infinities=False, high_nans=0))
    assert hash(how) == hash(Reduction(accumulate=Format.from_gfloat(fmt)))
    assert "accumulate=Format(3, 2, " in repr(how) and "ocp_e3m2" in repr(how)
    with gpusim.reduction(accumulate=fmt):
        total = gpusim.vmap(lambda v: gpusim.lax.psum(v, "i"), axis_name="i")(np.ones(20))
    assert total[0] == 8  # the spacing from 8 on is 2, and ties go to even


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (known.format_info_ocp_e8m0, ValueError, "has no zero"),
        (known.format_info_mxfp8_e5m2, TypeError, "accumulate="),
        (FormatInfo, TypeError, "accumulate="),
    ],
)
def test_what_is_no_accumulator_is_named(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Reduction(accumulate=given)


def test_gfloat_is_not_needed() -> None:
    program = "import gpusim, sys; gpusim.Format(5, 2); assert 'gfloat' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_only_a_format_info_becomes_a_format() -> None:
    with pytest.raises(TypeError, match=r"expected a gfloat\.FormatInfo"):
        Format.from_gfloat(known.format_info_mxfp8_e5m2)
