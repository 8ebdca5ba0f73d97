"""order="fixed": sums of integers, against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpusim.study
import gpusim.torch
from gpusim import Reduction, collectives
from gpusim.fallback import fold
from tests.oracles.budget import budget
from tests.oracles.reference_fold import FLOATS, NAN, Number, round_number

BITS = {None: 32, "int32": 32, "int16": 16, "int8": 8}
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


def rounded_to_even(value: Fraction) -> int:
    return round(value)  # Python's round of a Fraction takes ties to even


def reference(column: list[list[float]], bits: int, divisor: int | None) -> list[Fraction | float]:
    """The sums of a block (members, elements), before the one rounding to the result's type."""
    members = len(column)
    finite = [abs(x) for row in column for x in row if math.isfinite(x)]
    largest = Fraction(max(finite, default=0.0))
    e = 0
    while largest and largest >= Fraction(2) ** e:
        e += 1
    while largest and largest < Fraction(2) ** (e - 1):
        e -= 1
    h = 0
    while members > 2**h:
        h += 1
    unit = Fraction(2) ** (e + h - bits + 2)
    results: list[Fraction | float] = []
    for values in zip(*column, strict=True):
        if not all(map(math.isfinite, values)):
            results.append(float(np.sum([x for x in values if not math.isfinite(x)])))
            continue
        integers = [rounded_to_even(Fraction(x) / unit) for x in values]
        assert abs(sum(integers)) < 2 ** (bits - 1)
        total = sum(integers) * unit
        results.append(total if divisor is None else Fraction(float(total / divisor)))
    return results


def check(x: np.ndarray, accumulate: str | None, divisor: int | None = None) -> None:
    found = fold(x, order="fixed", accumulate=accumulate, divisor=divisor)
    rows = x.astype(np.float64)
    for first in range(0, x.shape[1], 256):
        block = rows[:, first : first + 256].tolist()
        expected = reference(block, BITS[accumulate], divisor)
        for value, mine in zip(expected, found[first : first + 256].tolist(), strict=True):
            if not isinstance(value, Fraction):
                assert repr(float(mine)) == repr(value)
            else:
                assert same(value, float(mine), x.dtype), (value, mine)


def same(value: Fraction, mine: float, dtype: Any) -> bool:
    """Whether `mine` is the value, rounded to the dtype."""
    if dtype == np.float64:
        return float(value) == mine
    rounded = round_number(Number(value < 0, abs(value)), FLOATS[np.dtype(dtype).name], None)
    if not rounded.finite:
        return math.isnan(mine) if rounded == NAN else mine == math.copysign(math.inf, value)
    return math.isfinite(mine) and rounded.value == Fraction(mine)


@given(st.data())
@settings(max_examples=budget(600))
def test_sums_are_those_of_rational_arithmetic(data: st.DataObject) -> None:
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    members = data.draw(st.sampled_from([2, 3, 5, 7, 8, 9]))
    size = data.draw(st.sampled_from([0, 1, 7, 33, 300]))
    accumulate = data.draw(st.sampled_from([None, "int8", "int16", "int32"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    spread = data.draw(st.sampled_from([0, 3, 30]))
    values = rng.standard_normal((members, size)) * 2.0 ** rng.integers(-spread, spread + 1, size)
    if size and data.draw(st.booleans()):
        values[rng.integers(members), rng.integers(size)] = rng.choice([np.inf, -np.inf, np.nan])
    with np.errstate(all="ignore"):
        check(values.astype(dtype), accumulate, data.draw(st.sampled_from([None, members])))


def test_the_order_of_members_changes_no_bit() -> None:
    x = np.random.default_rng(0).standard_normal((9, 700)).astype(np.float32)
    total = fold(x, order="fixed")
    for _ in range(5):
        assert np.array_equal(fold(np.random.default_rng(1).permutation(x), order="fixed"), total)
    assert np.abs(total - x.sum(0, dtype=np.float64)).max() < 1e-6


def test_cases_of_the_contract() -> None:
    zeros = np.array([[-0.0, 1.0], [-0.0, -1.0]], np.float32)
    assert np.signbit(fold(zeros, order="fixed")).tolist() == [False, False]
    one = np.array([[-0.0, 1e-30]], np.float32)
    assert np.array_equal(fold(one, order="fixed").view(np.int32), one[0].view(np.int32))
    assert fold(np.array([[1, 2], [3, 4]]), order="fixed").tolist() == [4, 6]
    tiny = np.array([[1.0, 2.0**-40], [1.0, 2.0**-40]], np.float32)
    assert fold(tiny, order="fixed").tolist() == [2.0, 0.0]
    subnormal = np.array([[2.0**-149], [2.0**-149]], np.float32)
    assert fold(subnormal, order="fixed").tolist() == [2.0**-148]
    largest = np.full((2, 1), np.finfo(np.float32).max)
    assert fold(largest, order="fixed").tolist() == [math.inf]


def test_it_runs_everywhere() -> None:
    x = np.random.default_rng(2).standard_normal((6, 40)).astype(np.float32)
    reduction = Reduction(order="fixed", accumulate="int16")
    total = gpusim.collectives.psum(x, reduction=reduction).value
    for map_ in (gpusim.vmap, gpusim.pmap):
        found = map_(lambda x: gpusim.lax.psum(x, "i", reduction=reduction), axis_name="i")(x)
        assert all(np.array_equal(each, total) for each in found)
    pairs = gpusim.collectives.psum(x, groups=[[0, 5], [1, 2, 3, 4]], reduction=reduction).value
    assert np.array_equal(pairs[0], fold(x[[0, 5]], order="fixed", accumulate="int16"))
    sliced = gpusim.collectives.psum_scatter(x[:, :36].reshape(6, 6, 6), reduction=reduction).value
    assert np.array_equal(sliced.reshape(-1), fold(x[:, :36], order="fixed", accumulate="int16"))


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"op": "prod"}, ValueError, "expected sums"),
        ({"rounding": "stochastic"}, ValueError, "rounded to nearest"),
        ({"accumulate": "float32"}, TypeError, "expected int8, int16, int32 or None"),
        ({"accumulate": "int64"}, TypeError, "expected int8, int16, int32 or None"),
        ({"accumulate": gpusim.Format(4, 3)}, TypeError, "expected int8, int16, int32 or None"),
        ({"wire": "bfloat16"}, ValueError, "wire at='hops'"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Reduction(order="fixed", **fields)


def test_groups_of_integers() -> None:
    x = np.random.default_rng(3).standard_normal((7, 300)).astype(np.float32)
    across = Reduction(order="fixed", accumulate="int16")
    levels = Reduction(order="fixed", accumulate="int16", groups_of=3, across=across)
    sums = [fold(x[a : a + 3], order="fixed", accumulate="int16") for a in (0, 3)] + [x[6]]
    expected = fold(np.stack(sums), order="fixed", accumulate="int16")
    assert np.array_equal(gpusim.collectives.psum(x, reduction=levels).value, expected)


ROOM = {"int8": 64, "int16": 16384}


@pytest.mark.parametrize("accumulate", ROOM)
def test_members_without_room_are_refused(accumulate: str) -> None:
    """Members beyond half of the unit, which here is 2, are rounded to it and not to zero."""
    most = ROOM[accumulate]
    x = np.full((most + 1, 2), 1.5, np.float32)
    assert fold(x[:most], order="fixed", accumulate=accumulate).tolist() == [2 * most] * 2
    said = (
        f"accumulate='{accumulate}', order='fixed': {most + 1:,} members, expected at most {most:,}"
    )
    with pytest.raises(ValueError, match=said):
        fold(x, order="fixed", accumulate=accumulate)
    integers = np.ones(x.shape, np.int32)  # are added as they are
    assert fold(integers, order="fixed", accumulate=accumulate).tolist() == [most + 1] * 2


def test_members_without_room_are_refused_everywhere() -> None:
    x, reduction = np.ones((65, 3), np.float32), Reduction(order="fixed", accumulate="int8")
    said = "65 members, expected at most 64"
    for call in (collectives.psum, collectives.pmean, collectives.psum_scatter):
        operand = x if call is not collectives.psum_scatter else np.ones((65, 65), np.float32)
        with pytest.raises(ValueError, match=said):
            call(operand, reduction=reduction)
    for map_ in (gpusim.vmap, gpusim.pmap):
        with pytest.raises(ValueError, match=said):
            map_(lambda x: gpusim.lax.psum(x, "i", reduction=reduction), axis_name="i")(x)
    with pytest.raises(ValueError, match=said):
        gpusim.torch.vmap(lambda x: gpusim.torch.psum(x, "i", reduction=reduction), axis_name="i")(
            torch.from_numpy(x)
        )
    with pytest.raises(ValueError, match=said):
        gpusim.study.sweep(x, replicas=65, dtypes="float32", orders="fixed", accumulators="int8")


def test_each_level_has_room_of_its_own() -> None:
    fixed = Reduction(order="fixed", accumulate="int8")
    x = np.ones((130, 1), np.float32)
    levels = Reduction(order="fixed", accumulate="int8", groups_of=32, across=fixed)
    assert collectives.psum(x[:128], reduction=levels).value.tolist() == [128]
    pairs = Reduction(groups_of=2, across=fixed)
    with pytest.raises(ValueError, match=r"across, accumulate='int8', .*: 65 members, .* most 64"):
        collectives.psum(x, reduction=pairs)
