"""order="kahan" and "neumaier": each operation of docs/numerics.md in exact arithmetic, rounded.

The reference here is written from that page, one number at a time, with Fractions; it shares no
code with the kernels.
"""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpusim
from gpusim import Format, Reduction, Wire, collectives, fallback, lax
from gpusim.fallback import limits, threads
from gpusim.fallback.spec import FoldSpec
from tests.contract.compensated_reference import ORDERS, compensated
from tests.contract.kernel_sets import on_every_set, runs_every_set
from tests.contract.test_fold_contract import COMPLEXES, INTS, REALS, numbers
from tests.cuda.host_cuda.values import same
from tests.oracles.budget import budget
from tests.oracles.reference_fold import (
    FLOATS,
    Number,
    codes_of,
    decode,
    divide,
    encode,
    part_codes,
    part_name,
    round_number,
)


def reference(
    members: np.ndarray, order: str, accumulate: Any = None, divisor: int | None = None
) -> list[tuple[int | None, ...]]:
    """The codes of the sum of each element's parts; None for NaN."""
    source = part_name(members.dtype)
    narrow = {"bfloat16": "float32", **{n: "float16" for n in FLOATS if n.startswith("float8")}}
    acc = narrow.get(source, source) if accumulate is None else np.dtype(accumulate).name
    computing = "float64" if "float64" in (source, acc) else "float32"

    def in_c(x: Number) -> Number:
        return round_number(x, FLOATS[computing], None)

    def rounded(x: Number) -> Number:
        return round_number(in_c(x), FLOATS[acc], None)

    codes = part_codes(members).reshape(len(members), -1, 2 if members.dtype.kind == "c" else 1)
    found = []
    for element in range(codes.shape[1]):
        parts = []
        for part in range(codes.shape[2]):
            xs = [decode(int(code), FLOATS[source]) for code in codes[:, element, part]]
            total = compensated(order, xs, rounded)
            if divisor is not None:
                total = in_c(divide(total, divisor))
            parts.append(encode(round_number(total, FLOATS[source], None), FLOATS[source]))
        found.append(tuple(parts))
    return found


def close(seed: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Values of a few neighbouring exponents, whose additions lose bits that others need."""
    random = np.random.default_rng(seed)
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        return close(seed, (*shape, 2), part).view(dtype)[..., 0]
    return (random.normal(size=shape) * 2.0 ** random.integers(-4, 5, shape)).astype(dtype)


@runs_every_set
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [*REALS, *COMPLEXES], ids=str)
def test_sums_have_the_bits_of_rational_arithmetic(dtype: np.dtype[Any], order: str) -> None:
    for members, values in product((1, 2, 3, 5, 7, 9), (numbers, close)):
        x = values(members, (members, 23), dtype)
        for divisor in (None, members):
            found = on_every_set(lambda x=x, n=divisor: fallback.fold(x, order=order, divisor=n))
            assert codes_of(found) == reference(x, order, None, divisor)


@runs_every_set
@settings(max_examples=budget(400, most=60), deadline=None)
@given(st.data())
def test_every_accumulator_has_the_bits(data: st.DataObject) -> None:
    dtype, accumulate = data.draw(st.sampled_from(REALS)), data.draw(st.sampled_from(REALS))
    order, members = data.draw(st.sampled_from(ORDERS)), data.draw(st.integers(1, 12))
    values = data.draw(st.sampled_from([numbers, close]))
    x = values(data.draw(st.integers(0, 2**30)), (members, 11), dtype)
    options: dict[str, Any] = {"order": order, "accumulate": accumulate}
    found = on_every_set(lambda: fallback.fold(x, **options))
    assert codes_of(found) == reference(x, order, accumulate)
    listed = on_every_set(lambda: fallback.fold(list(x), **options))
    apart = on_every_set(lambda: fallback.fold(np.repeat(x, 2, axis=1)[:, ::2], **options))
    assert codes_of(listed) == codes_of(apart) == codes_of(found)


INF, NAN, MOST = math.inf, math.nan, float(np.finfo(np.float32).max)
EDGES: dict[str, tuple[list[float], float, float]] = {  # members, Kahan's sum, Neumaier's
    "what is lost one by one": ([1.0, *[2.0**-24] * 4], 1 + 2.0**-22, 1 + 2.0**-22),
    "what a larger member covers": ([1.0, 2.0**60, 1.0, -(2.0**60)], 0.0, 2.0),
    "infinity": ([1.0, INF, 2.0, -3.0], INF, INF),
    "infinity first": ([-INF, 1.0, 2.0], -INF, -INF),
    "infinities": ([INF, 1.0, -INF, 2.0], NAN, NAN),
    "NaN": ([1.0, NAN, 2.0], NAN, NAN),
    "an overflow": ([MOST, MOST, 1.0, -MOST], INF, INF),
    "negative zeros": ([-0.0, -0.0, -0.0], -0.0, -0.0),
    "zeros": ([-0.0, 0.0], 0.0, 0.0),
    "one negative zero": ([-0.0], -0.0, -0.0),
    "subnormal": ([2.0**-149, 2.0**-140, -(2.0**-140)], 2.0**-149, 2.0**-149),
}


@pytest.mark.parametrize("name", EDGES)
def test_sums_at_the_edges(name: str) -> None:
    values, *expected = EDGES[name]
    x = np.array(values, np.float32)
    for order, total in zip(ORDERS, expected, strict=True):
        same(on_every_set(lambda o=order: fallback.fold(x, order=o)), np.float32(total))
        # Beside a sum that stays finite, whose compensation is not touched.
        beside = np.stack([x, np.full(len(x), 2.0**-24, np.float32)], axis=1)
        beside[0, 1] = 1
        found = on_every_set(lambda o=order, two=beside: fallback.fold(two, order=o))
        same(found, np.array([total, fallback.fold(beside[:, 1], order=order)], np.float32))


@pytest.mark.parametrize("order", ORDERS)
def test_sums_are_better_than_linear_ones(order: str) -> None:
    x = np.random.default_rng(0).random((4096, 64)).astype(np.float32)
    exact = np.array([math.fsum(column) for column in x.T.astype(float).tolist()])
    error = np.abs(fallback.fold(x, order=order) - exact).max()
    assert error <= np.spacing(np.float32(exact.max())) < np.abs(fallback.fold(x) - exact).max()


@pytest.mark.parametrize("shape", [(3,), (1,), (3, 0), (5, 2, 0), (4, 3, 2)])
@pytest.mark.parametrize("order", ORDERS)
def test_values_of_any_shape(shape: tuple[int, ...], order: str) -> None:
    x = close(0, shape, np.dtype(np.float16))
    found = on_every_set(lambda: fallback.fold(x, order=order))
    assert found.shape == shape[1:] and found.dtype == x.dtype
    assert codes_of(found) == reference(x.reshape(shape[0], -1), order)


def test_integers_and_selections_are_those_of_any_order() -> None:
    for order in ORDERS:
        for dtype in INTS:
            x = np.random.default_rng(0).integers(0, 100, (6, 20)).astype(dtype)
            same(fallback.fold(x, order=order), fallback.fold(x))
        floats = numbers(3, (6, 20), np.dtype(np.float32))
        for op in ("max", "min", "logical_and", "logical_or"):
            same(fallback.fold(floats, order=order, op=op), fallback.fold(floats, op=op))
        first = fallback.fold(floats[:2], order=order, op="max", final=False)
        rest = fallback.fold(floats[2:], order=order, op="max", partial=first, before=2)
        same(rest, fallback.fold(floats, op="max"))


@pytest.mark.parametrize("order", ORDERS)
def test_formats_are_accumulators(order: str) -> None:
    """A Format that is a dtype has the dtype's bits; one of fixed-point numbers loses nothing."""
    x = close(1, (9, 40), np.dtype(np.float32))
    half = fallback.fold(x, order=order, accumulate=Format(5, 10).info)
    same(half, fallback.fold(x, order=order, accumulate=np.float16))
    fixed = Format(0, 8, bias=-5, has_infinities=False, is_twos_complement=True)
    grid = np.random.default_rng(0).integers(-9, 10, (5, 30)) * fixed.smallest
    same(fallback.fold(grid, order=order, accumulate=fixed.info), grid.sum(axis=0))


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: Reduction(op="prod", order="kahan"), "op='prod', order='kahan': expected op='sum'"),
    (lambda: FoldSpec(op="prod", order="neumaier"), "op='prod', order='neumaier': expected"),
    (
        lambda: Reduction(order="kahan", rounding="stochastic"),
        "rounding='stochastic', order='kahan': expected 'nearest'",
    ),
    (
        lambda: Reduction(order="neumaier", accumulate=Format(4, 3, is_signed=False)),
        "an unsigned format, order='neumaier'",
    ),
    (lambda: Reduction(order="kahan", wire="bfloat16"), "order='kahan', wire at='hops': expected"),
    (
        lambda: fallback.fold(np.ones((2, 3)), order="kahan", final=False),
        "order='kahan': expected all members at once",
    ),
    (
        lambda: fallback.fold(np.ones((2, 3)), order="neumaier", partial=np.ones(3), before=1),
        "order='neumaier': expected all members at once",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_compensated_sums_do_not_take_is_refused(
    call: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize("order", ORDERS)
def test_collectives_have_the_bits_of_the_fold(order: str) -> None:
    values = close(2, (6, 12), np.dtype(np.float16))
    total = gpusim.as_reduction(f"{order} accumulate=bfloat16")
    assert str(total) == f"{order} accumulate=bfloat16"

    def fold(x: np.ndarray) -> np.ndarray:
        return fallback.fold(x, order=order, accumulate=ml_dtypes.bfloat16)

    for run in (gpusim.vmap, gpusim.pmap):
        found = run(lambda x: lax.psum(x, "i", reduction=total), axis_name="i")(values)
        same(np.asarray(found), np.broadcast_to(fold(values), (6, 12)))
        pieces = run(
            lambda x: lax.psum_scatter(x, "i", reduction=total, tiled=True), axis_name="i"
        )(values)
        same(np.asarray(pieces).reshape(12), fold(values))
        leaves = run(lambda x: lax.psum((x, x[:5]), "i", reduction=total), axis_name="i")(values)
        same(np.asarray(leaves[1][0]), fold(values[:, :5]))
    uneven = collectives.psum(values, groups=[[5, 0, 2], [1], [4, 3]], reduction=total).value
    for members in ([5, 0, 2], [1], [4, 3]):
        for member in members:
            same(np.asarray(uneven[member]), fold(values[members]))


@pytest.mark.parametrize("order", ORDERS)
def test_levels_fold_sums_that_are_rounded_to_the_accumulator(order: str) -> None:
    x = close(3, (11, 30), np.dtype(np.float32))
    two = Reduction(order=order, accumulate="float16", groups_of=4, across=Reduction(order=order))
    sums = [
        fallback.fold(x[a : a + 4].astype(np.float32), order=order, accumulate=np.float16)
        for a in (0, 4, 8)
    ]
    halves = np.stack(sums).astype(np.float16)  # which hold them
    expected = fallback.fold(halves, order=order, out_dtype=np.float32)
    same(on_every_set(lambda: collectives.psum(x, reduction=two).value), expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("at", ["ends", "members", "result"])
def test_wires_round_members_and_the_result(order: str, at: str) -> None:
    x = close(4, (7, 70), np.dtype(np.float32))
    wire = Wire("int8", scale="amax", block=16, at=at)
    sent = x if at == "result" else np.stack([gpusim.round_to(row, wire) for row in x])
    expected = fallback.fold(sent, order=order)
    if at != "members":
        expected = gpusim.round_to(expected, wire)
    total = Reduction(order=order, wire=wire)
    same(on_every_set(lambda: collectives.psum(x, reduction=total).value), expected)
    narrow = Reduction(order=order, wire=Wire("bfloat16", at=at))  # of no scale
    x *= np.ldexp(np.float32(1), 5 * np.arange(7)[::-1])[
        :, np.newaxis
    ]  # float32 does not hold the sums
    assert at == "result" or not np.array_equal(
        fallback.fold(x.astype(ml_dtypes.bfloat16).astype(np.float32)),
        fallback.fold(x.astype(ml_dtypes.bfloat16).astype(np.float32), order=order),
    )
    sent = x if at == "result" else x.astype(ml_dtypes.bfloat16).astype(np.float32)
    expected = fallback.fold(sent, order=order)
    if at != "members":
        expected = expected.astype(ml_dtypes.bfloat16).astype(np.float32)
    same(on_every_set(lambda: collectives.psum(x, reduction=narrow).value), expected)


@pytest.mark.parametrize("order", ORDERS)
def test_members_are_divided_first(order: str) -> None:
    x = close(5, (6, 33), np.dtype(np.float32))
    mean = Reduction(order=order, divide="members")
    expected = fallback.fold(x / np.float32(6), order=order)
    same(on_every_set(lambda: collectives.pmean(x, reduction=mean).value), expected)


@pytest.mark.parametrize("kernels", ["numpy", "compiled"])
@pytest.mark.parametrize("order", ORDERS)
def test_memory_is_that_of_blocks(order: str, kernels: str) -> None:
    """The members have 32 MiB; with the masks of sums that are not finite, too."""
    x = close(6, (8, 1 << 20), np.dtype(np.float32))
    x[3, ::1000] = np.inf
    out = np.empty(x.shape[1:], np.float32)
    tracemalloc.start()
    try:
        with fallback.kernels.chosen(kernels), threads.limited(1):
            fallback.fold(x, order=order, out=out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * 4 * limits.BLOCK, peak
