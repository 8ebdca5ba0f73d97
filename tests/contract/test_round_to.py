"""round_to: one correct rounding, against exact arithmetic and against the formats' definitions."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.fallback import round_to
from tests.contract.fold_limits import fold_limits
from tests.oracles.reference_fold import (
    FLOATS,
    codes_of,
    decode,
    encode,
    lane,
    part_codes,
    round_number,
)

DTYPES = [np.dtype(getattr(ml_dtypes, name, name)) for name in FLOATS]
NARROW = [dtype for dtype in DTYPES if dtype.itemsize < 4]


@np.errstate(all="ignore")
def every(dtype: np.dtype[Any]) -> np.ndarray:
    """All values of a format of 8 or 16 bits."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    return np.arange(2 ** (8 * dtype.itemsize), dtype=unsigned).view(dtype)


@np.errstate(all="ignore")
def hard_values(target: np.dtype[Any], source: str) -> np.ndarray:
    """Every value of the target, every midpoint between two, and what lies just beside those."""
    step = max(1, 2 ** (8 * target.itemsize) // 2048)  # of 16-bit formats not all
    values = every(target).astype(np.float64)[::step]
    after = every(target).astype(np.float64)[1::step] if step > 1 else np.roll(values, -1)
    middles = (values + after) / 2
    points = np.concatenate([values, middles])
    beside = [np.nextafter(points, -np.inf), np.nextafter(points, np.inf)]
    top = float(FLOATS[target.name].largest)
    far = [top * f for f in (1 + 2**-9, 1.03, 1.0625, 1.07, 1.125, 1.2, 2, 1e9)]
    tiny = [5e-324, -5e-324]
    return np.concatenate([points, *beside, far, np.negative(far), tiny]).astype(source)


def expected(
    x: np.ndarray, target: np.dtype[Any], draws: dict[str, int] | None = None
) -> list[Any]:
    source, fmt = FLOATS[x.dtype.name], FLOATS[target.name]
    codes = part_codes(x).reshape(-1).tolist()
    stochastic = draws is not None and fmt.bits < 32
    return [
        (
            encode(
                round_number(
                    decode(code, source),
                    fmt,
                    lane(**draws, index=index) if stochastic and draws else None,
                ),
                fmt,
            ),
        )
        for index, code in enumerate(codes)
    ]


@pytest.mark.parametrize("cast_width", [0, 1 << 30])
@pytest.mark.parametrize("source", ["float32", "float64"])
@pytest.mark.parametrize("target", NARROW, ids=str)
def test_nearest_is_right_at_every_midpoint(
    target: np.dtype[Any], source: str, cast_width: int
) -> None:
    x = hard_values(target, source)
    with fold_limits(CAST_WIDTH=cast_width):
        assert codes_of(round_to(x, target)) == expected(x, target)


def test_float64_is_rounded_once_and_not_by_way_of_float32() -> None:
    x = 1 + 2.0**-8 + 2.0**-40  # float32 makes a tie of it
    assert round_to(x, ml_dtypes.bfloat16).tolist() == 1 + 2.0**-7
    assert np.float64(x).astype(ml_dtypes.bfloat16) == 1


@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", NARROW, ids=str)
def test_every_value_of_the_small_formats_is_converted(
    source: np.dtype[Any], target: np.dtype[Any]
) -> None:
    x = every(source)[:: 1 if source.itemsize == 1 else 97]
    assert codes_of(round_to(x, target)) == expected(x, target)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(["float32", "float64"]),
    st.fixed_dictionaries(
        {name: st.integers(0, 2**64 - 1) for name in ("seed", "step", "call", "place")}
    ),
    st.integers(-160, 135),
    st.integers(1, 20),
)
def test_stochastic_rounding_follows_the_lanes(
    target: np.dtype[Any], source: str, draws: dict[str, int], exponent: int, block: int
) -> None:
    random = np.random.default_rng(draws["seed"])
    with np.errstate(over="ignore"):
        x = (random.normal(size=(3, 7)) * 2.0**exponent).astype(source)
    x[0, :5] = [0.0, -0.0, np.inf, -np.inf, np.nan]
    with fold_limits(BLOCK=block):
        result = round_to(x, target, rounding="stochastic", **draws)
    assert codes_of(result) == expected(x, target, draws)


@pytest.mark.parametrize("source", ["float32", "float64"])
@pytest.mark.parametrize("target", NARROW, ids=str)
def test_stochastic_rounding_of_hard_values_follows_the_lanes(
    target: np.dtype[Any], source: str
) -> None:
    x = hard_values(target, source)[::5]
    draws = {"seed": 1, "step": 2, "call": 3, "place": 4}
    result = round_to(x, target, rounding="stochastic", **draws)
    assert codes_of(result) == expected(x, target, draws)


def test_values_of_the_format_do_not_change_under_stochastic_rounding() -> None:
    for target in NARROW:
        x = every(target)
        rounded = round_to(x.astype(np.float32), target, rounding="stochastic", seed=9)
        assert codes_of(rounded) == codes_of(x)


def test_above_the_largest_value_stochastic_rounding_goes_to_either_side() -> None:
    x = np.full(10_000, 65512.0, np.float32)  # a quarter of the way from 65504 to 65536
    infinite = np.isinf(round_to(x, np.float16, rounding="stochastic")).mean()
    assert abs(infinite - 0.25) < 5 * (0.25 * 0.75 / x.size) ** 0.5
    top = np.full(10_000, 470.0, np.float32)
    lost = np.isnan(round_to(top, ml_dtypes.float8_e4m3fn, rounding="stochastic")).mean()
    assert abs(lost - 22 / 32) < 5 * (22 * 10 / 32**2 / top.size) ** 0.5


def test_a_nan_with_a_small_payload_stays_one() -> None:
    x = np.array([0x7F800001, 0xFF800001], np.uint32).view(np.float32)
    for rounding in ("nearest", "stochastic"):
        assert np.isnan(round_to(x, ml_dtypes.bfloat16, rounding=rounding).astype(float)).all()


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3, 4)])
def test_the_shape_is_kept_and_the_result_is_new(shape: tuple[int, ...]) -> None:
    x = np.ones(shape, np.float32, order="F")
    result = round_to(x, np.float32)
    assert result.shape == shape and result.flags.c_contiguous
    assert not np.shares_memory(result, x)


@pytest.mark.parametrize(
    ("x", "dtype", "options", "error", "message"),
    [
        (np.ones(2, int), "float16", {}, TypeError, "x: int64 given"),
        (np.ones(2), np.int8, {}, TypeError, "dtype: int8 given"),
        (np.ones(2, complex), "float16", {}, TypeError, "x: complex128 given"),
        (np.ones(2), "float16", {"rounding": "odd"}, ValueError, "rounding='odd'"),
        (np.ones(2), "float16", {"place": -1}, ValueError, "place=-1"),
        (np.ones(2), "float16", {"place": [0, -1], "batch_ndim": 1}, ValueError, "places="),
        (np.ones(2), "float16", {"place": [0, 1, 2], "batch_ndim": 1}, ValueError, "shape .3,."),
    ],
)
def test_what_cannot_be_rounded_is_named(
    x: Any, dtype: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        round_to(x, dtype, **options)
