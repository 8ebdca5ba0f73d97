"""order="exact": the exact sum of all members, rounded once, with the same bits in every order.

Sums are checked by their definition: the result is the value of the format next to the exact sum.
`math.fsum` gives the sign of exact differences, and shares no code with the kernels.
"""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpusim
from gpusim import Reduction, collectives, fallback, lax
from gpusim.fallback import exact as implementation
from gpusim.fallback import limits, threads
from gpusim.fallback.blocks import plan_blocks
from gpusim.fallback.formats import FLOAT32, FLOAT64, SUB_32_BIT
from gpusim.fallback.spec import FoldSpec
from tests.contract.test_fold_contract import COMPLEXES, INTS, REALS, numbers
from tests.cuda.host_cuda.values import same
from tests.oracles.budget import SEED, budget
from tests.oracles.reference_fold import FLOATS, codes_of, reference_fold

MEMBERS = (1, 2, 3, 5, 7, 9)


def exact(members: Any, **options: Any) -> np.ndarray:
    return fallback.fold(members, order="exact", **options)


@np.errstate(all="ignore")
def adversarial(dtype: np.dtype[Any], members: int, count: int, seed: int) -> np.ndarray:
    """Finite members whose sums are hard to round: (members, count).

    Half of the sums are built: a value of the format, half of its last bit, and a nearly or
    altogether vanishing rest, with pairs of large numbers that cancel. The others are of any bits,
    or of exponents of all sizes. No sum of magnitudes is infinite in float64.
    """
    random = np.random.default_rng(seed)
    if dtype == FLOAT64:
        fraction, low, high = 52, -1070, 1000
    else:
        info = SUB_32_BIT.get(dtype)
        fraction, low, high = (
            (info.fraction_bits, info.min_ulp, info.max_exponent) if info else (23, -149, 127)
        )
    shape = members, count
    exponents = random.integers(low, high, count)
    significands = random.integers(2**fraction, 2 ** (fraction + 1), count).astype(float)
    signs = random.choice([-1.0, 1.0], shape)
    built = np.zeros(shape)
    built[0] = np.ldexp(significands, exponents - fraction)
    if members > 1:
        built[1] = np.ldexp(signs[1], exponents - fraction - 1)
    if members > 2:
        rest = np.where(random.random(count) < 0.7, signs[2], 0.0)
        built[2] = np.ldexp(rest, random.integers(low - fraction, exponents + 1))
    for pair in range(3, members - 1, 2):
        built[pair] = np.ldexp(random.random(count) + 1, random.integers(low, high, count))
        built[pair + 1] = -built[pair]
    spread = np.ldexp(signs * (random.random(shape) + 1), random.integers(low, high, shape))
    any_bits = random.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    kind = random.integers(0, 4, count)
    # Rounded to the format first, so that pairs still cancel.
    values = np.where(kind < 2, built.astype(dtype), spread.astype(dtype))
    values = np.where(kind == 3, any_bits, values)
    wide = values.astype(np.float64)
    values[~(np.abs(wide) < 2.0**1005)] = 1
    return random.permuted(values, axis=0)


def check_sums(values: np.ndarray, found: np.ndarray) -> None:
    """Assert that each sum of a column of finite values is correctly rounded."""
    columns = values.astype(np.float64).T.tolist()
    if found.dtype == FLOAT64:
        expected = np.array([math.fsum(column) for column in columns])
        assert np.array_equal(found, expected)
        return
    fmt = FLOATS[found.dtype.name]
    width = f"u{found.dtype.itemsize}"
    codes = found.view(width)
    positive = codes & (2 ** (fmt.bits - 1) - 1)
    unsigned = np.where(np.isnan(found.astype(np.float64)), fmt.largest_code + 1, positive)

    def magnitude(code: np.ndarray) -> np.ndarray:
        beyond = code > fmt.largest_code
        inside = np.where(beyond, fmt.largest_code, code).astype(width)
        finite = inside.view(found.dtype).astype(np.float64)
        ulp = float(fmt.largest - fmt.magnitude(fmt.largest_code - 1))
        return np.where(beyond, float(fmt.largest) + ulp, finite)

    unsigned = unsigned.astype(np.int64)
    here = magnitude(unsigned)
    above = np.where(unsigned > fmt.largest_code, math.inf, (here + magnitude(unsigned + 1)) / 2)
    least = magnitude(np.ones_like(unsigned))
    below = np.where(unsigned == 0, -least / 2, (here + magnitude(np.maximum(unsigned, 1) - 1)) / 2)
    even = unsigned % 2 == 0
    bounds = zip(below.tolist(), above.tolist(), even.tolist(), strict=True)
    negative = (codes >> (fmt.bits - 1)).astype(bool).tolist()
    overflown = (unsigned > fmt.largest_code).tolist()
    for column, sign, (low, high, ties), over in zip(
        columns, negative, bounds, overflown, strict=True
    ):
        # NaN in the place of infinity has any sign.
        turn = math.fsum(column) < 0 if over else sign
        terms = [-x for x in column] if turn else column
        from_low = math.fsum([*terms, -low])
        assert from_low > 0 or (from_low == 0 and (ties or over)), (column, low)
        if high < math.inf:
            to_high = math.fsum([*terms, -high])
            assert to_high < 0 or (to_high == 0 and ties), (column, high)


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_adversarial_sums_are_correctly_rounded(dtype: np.dtype[Any]) -> None:
    """10,000,000 sums in the full run, over all formats and numbers of members."""
    every = budget(10_000_000 // len(REALS), most=9_600) // len(MEMBERS)
    for members in MEMBERS:
        for first in range(0, every, 100_000):
            count = min(every - first, 100_000)
            values = adversarial(dtype, members, count, seed=SEED + first + members)
            check_sums(values, exact(values))


def test_adversarial_sums_take_both_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    by_digits = implementation._by_digits

    def counted(job: Any, count: int, width: int, places: Any, odd: bool) -> Any:
        taken.append(len(places))
        return by_digits(job, count, width, places, odd)

    monkeypatch.setattr(implementation, "_by_digits", counted)
    exact(adversarial(FLOAT64, 5, 1000, seed=0))
    assert 100 < sum(taken) < 900


@settings(max_examples=budget(2000, most=60), deadline=None)
@given(st.data())
def test_the_order_of_members_changes_no_bit(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(REALS + COMPLEXES))
    members, seed = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 2**30))
    values = numbers(seed, (members, 33), dtype)
    if data.draw(st.booleans()) and dtype.kind != "c":
        values = adversarial(dtype, members, 33, seed)
    options = {
        "accumulate": data.draw(st.none() | st.sampled_from(REALS)),
        "rounding": data.draw(st.sampled_from(["nearest", "stochastic"])),
        "divisor": data.draw(st.none() | st.just(members)),
    }
    order = data.draw(st.permutations(range(members)))
    same(exact(values[order], **options), exact(values, **options))


@pytest.mark.parametrize("dtype", [*REALS, *COMPLEXES], ids=str)
@pytest.mark.parametrize("members", [1, 3, 5, 7, 64])
def test_sums_have_the_bits_of_rational_arithmetic(dtype: np.dtype[Any], members: int) -> None:
    values = numbers(members, (members, 2, 9), dtype)
    for out in COMPLEXES if dtype.kind == "c" else (dtype, FLOAT32, np.dtype(np.float16)):
        for rounding in ("nearest", "stochastic"):
            options = {"out_dtype": out, "rounding": rounding, "seed": 3, "call": 2}
            expected = reference_fold(list(values), order="exact", batch_ndim=1, **options)
            assert codes_of(exact(values, batch_ndim=1, **options)) == expected


@pytest.mark.parametrize("shape", [(3, 0), (1, 0, 4), (5, 2, 0)])
def test_empty_arrays_have_empty_sums(shape: tuple[int, ...]) -> None:
    assert exact(np.zeros(shape, np.float32)).shape == shape[1:]


def column(*values: float, dtype: Any = np.float64) -> np.ndarray:
    return np.array(values, dtype).reshape(-1, 1)


LARGEST = float(np.finfo(np.float64).max)
TINY = 5e-324
SUMS: dict[str, tuple[list[float], float]] = {
    "an overflow on the way": ([LARGEST, LARGEST, -LARGEST], LARGEST),
    "an overflow of the sum": ([LARGEST, LARGEST, TINY], math.inf),
    "less than half an ulp beyond": ([LARGEST, 2.0**969, -TINY], LARGEST),
    "half an ulp beyond": ([LARGEST, 2.0**969, 2.0**969], math.inf),
    "below zero": ([-LARGEST, -LARGEST, LARGEST], -LARGEST),
    "a rest": ([LARGEST, TINY, -LARGEST], TINY),
    "two scales": ([1.0, 2.0**-53, TINY], 1 + 2.0**-52),
    "three scales": ([2.0**900, 1.0, 2.0**-53, -TINY, -(2.0**900)], 1.0),
    "a tie": ([1.0, 2.0**-53], 1.0),
    "an odd tie": ([1 + 2.0**-52, 2.0**-53], 1 + 2.0**-51),
    "subnormal": ([3 * TINY, -TINY], 2 * TINY),
    "zeros of both signs": ([-0.0, 0.0, -0.0], 0.0),
    "negative zeros": ([-0.0, -0.0, -0.0], -0.0),
    "what cancels": ([LARGEST, 1.0, TINY, -TINY, -1.0, -LARGEST], 0.0),
    "infinity": ([math.inf, -LARGEST, -LARGEST], math.inf),
    "infinities": ([math.inf, 1.0, -math.inf], math.nan),
    "NaN": ([math.nan, math.inf, 1.0], math.nan),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_at_the_edges(name: str) -> None:
    values, expected = SUMS[name]
    for turned in (values, values[::-1]):
        same(exact(column(*turned)), np.array([expected]))
        beside = column(1.0, TINY, *turned[2:])  # a sum whose errors are added, too
        same(exact(np.hstack([column(*turned), beside]))[:1], np.array([expected]))


def test_a_sum_is_rounded_once() -> None:
    """float32 would first round 1 + 2**-11 + 2**-40 to the tie that float16 rounds down."""
    values = column(1, 2.0**-11, 2.0**-24, dtype=np.float16)
    assert float(exact(values)[0]) == 1 + 2.0**-10
    wide = column(1, 2.0**-11, 2.0**-40, dtype=np.float32)
    assert float(exact(wide, out_dtype=np.float16)[0]) == 1 + 2.0**-10
    assert float(exact(wide, out_dtype=np.float16, accumulate=np.float32)[0]) == 1


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(
    "chosen",
    [gpusim.Format(3, 2), gpusim.Format(8, 0, has_infinities=False), gpusim.Format(5, 18)],
    ids=str,
)
def test_formats_are_rounded_to_as_by_round_to(chosen: Any, rounding: str) -> None:
    """The exact sums are float64 values here, and round_to rounds these once."""
    random = np.random.default_rng(0)
    values = np.ldexp(random.integers(-(2**20), 2**20, (7, 500)), random.integers(-30, -10, 500))
    sums = values.sum(axis=0)
    options: dict[str, Any] = {"rounding": rounding, "seed": 4}
    expected = fallback.round_to(sums, chosen.info, **options).astype(np.float64)
    same(exact(values, accumulate=chosen.info, **options), expected)


def test_integers_and_selections_have_one_result_in_all_orders() -> None:
    for dtype in INTS:
        values = np.random.default_rng(0).integers(0, 100, (6, 20)).astype(dtype)
        same(exact(values), fallback.fold(values))
    values = adversarial(FLOAT32, 6, 20, seed=0)
    for op in ("max", "min", "logical_and", "logical_or"):
        same(exact(values, op=op), fallback.fold(values, op=op))


def test_a_mean_is_the_rounded_sum_divided() -> None:
    values = adversarial(FLOAT32, 5, 500, seed=1)
    same(exact(values, divisor=5), exact(values) / np.float32(5))
    total = gpusim.vmap(lambda x: lax.pmean(x, "i"), axis_name="i", out_axes=None)
    with gpusim.reduction(order="exact"):
        same(total(values), exact(values, divisor=5))


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: FoldSpec(op="prod", order="exact"), "op='prod', order='exact': expected op='sum'"),
    (lambda: Reduction(op="prod", order="exact"), "op='prod', order='exact': expected op='sum'"),
    (
        lambda: Reduction(order="exact", accumulate=gpusim.Format(11, 51)),
        "a format of 51 fraction bits, order='exact': expected at most 50",
    ),
    (
        lambda: Reduction(order="exact", accumulate=gpusim.Format(4, 20), rounding="stochastic"),
        "a format of 20 fraction bits, order='exact', rounding='stochastic': expected at most 19",
    ),
    (
        lambda: exact(np.ones((2, 3)), final=False),
        "order='exact': expected all members at once",
    ),
    (
        lambda: exact(np.ones((2, 3)), partial=np.ones(3), before=1),
        "order='exact': expected all members at once",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_exact_sums_do_not_take_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


def test_collectives_have_the_bits_of_the_fold() -> None:
    values = adversarial(np.dtype(np.float16), 6, 12, seed=2)
    total = Reduction(order="exact")
    expected = exact(values)
    for run in (gpusim.vmap, gpusim.pmap):
        found = run(lambda x: lax.psum(x, "i", reduction=total), axis_name="i")(values)
        same(np.asarray(found), np.broadcast_to(expected, (6, 12)))
        pieces = run(
            lambda x: lax.psum_scatter(x, "i", reduction=total, tiled=True), axis_name="i"
        )(values)
        same(np.asarray(pieces).reshape(12), expected)
    uneven = collectives.psum(values, groups=[[5, 0, 2], [1], [4, 3]], reduction=total).value
    for members in ([5, 0, 2], [1], [4, 3]):
        for member in members:
            same(np.asarray(uneven[member]), exact(values[members]))


def test_many_members_and_wide_values_have_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    values = adversarial(FLOAT64, 37, 500, seed=3)
    expected = np.array([math.fsum(each) for each in values.T.tolist()])
    for width in (8, 40, 1000, limits.EXACT_BLOCK):
        monkeypatch.setattr(limits, "EXACT_BLOCK", width)
        plan_blocks.cache_clear()
        cut = slice(None, 50 if width == 8 else None)
        same(exact(values[:, cut]), expected[cut])
    plan_blocks.cache_clear()


def test_memory_is_that_of_blocks() -> None:
    """All elements take the long way here. The inputs have 32 MiB, and would have twice that."""
    values = np.tile(adversarial(FLOAT64, 5, 1000, seed=4), (1, 800))
    out = np.empty(values.shape[1:])
    tracemalloc.start()
    try:
        with threads.limited(1):
            exact(values, out=out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20, peak
