"""Wires and levels: the bits of `wire_reference`, through every way to a sum on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpusim
from fallback import run_fold, threads
from fallback.schedules import Balanced, Binary, Case, Loops, Schedule, Segments, Tree, Walk
from gpusim import Format, Reduction, Wire, collectives, lax
from gpusim.collectives.fold import fold_spec
from tests.contract import wire_reference
from tests.contract.wire_reference import reference
from tests.contract.fold_limits import fold_limits
from tests.oracles.budget import budget, slow
from tests.oracles.reference_fold import FLOATS, codes_of

REALS = [np.dtype(getattr(ml_dtypes, name, name)) for name in FLOATS]
FLOAT32 = np.dtype(np.float32)
NARROW = [name for name in wire_reference.NAMED if name not in ("float32", "float64")]
FORMATS: list[Any] = [
    *NARROW,
    Format(3, 0),
    Format(5, 9, has_infinities=False, high_nans=0),
    Format(4, 2, has_subnormals=False),
    Format(6, 12, bias=40),
    Format(3, 4, has_negative_zero=False, has_infinities=False),
    Format(9, 10),  # float32 does not hold it
]
WIDE: list[Any] = ["float32", "float64", Format(8, 30)]
SCHEDULES: dict[str, Any] = {
    "down": Walk(start=-1, step=-1),
    "from the second": Walk(start=1),
    "gloo's ring": Walk(start=-1, step=-1, cut=Segments(most=16)),
    "a ring the other way": Walk(start=2, step=-1, cut=Balanced()),
    "NCCL's ring": Walk(start=1, cut=Loops(chunk=16, align=4, channels=2)),
    "loops of one chain": Walk(cut=Loops(chunk=64, align=4, channels=3)),
    "pairs first": Tree(pairs_first=True),
    "a tree": Tree(),
    "a binary tree": Binary(),
}
ORDERS: list[Any] = ["linear", "reverse", "tree", "ring"]
ORDERS += [Schedule((Case(fold),)) for fold in SCHEDULES.values()]
ORDERS += [Schedule((Case(Walk(start=-1, step=-1)),), hops="own")]
ACCUMULATORS: list[Any] = [*REALS, Format(6, 9), Format(5, 16, has_infinities=False)]


@np.errstate(over="ignore", invalid="ignore")
def numbers(seed: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Numbers of one size, of all sizes, small ones, any bits, many zeros, or of all sorts.

    Infinity and NaN are rare in half of them, and absent from the others.
    """
    random = np.random.default_rng(seed)
    wide = np.float64 if dtype.itemsize == 8 else np.float32
    most = np.finfo(wide).maxexp if seed % 5 == 0 else 12
    bits = random.integers(0, 2 ** (8 * dtype.itemsize), shape, f"u{dtype.itemsize}")
    fmt = FLOATS[dtype.name]
    low = bits & bits.dtype.type(2 ** (fmt.fraction_bits + 2) - 1)
    moderate = random.normal(size=shape)
    scaled = np.ldexp(moderate, random.integers(-most, most, shape))
    rows = np.ldexp(moderate, random.integers(-most, most))
    zeros = moderate * (random.random(shape) < 0.3)
    powers = np.copysign(np.ldexp(1.0, random.integers(-9, 9, shape)), moderate)
    reals = [moderate, scaled, rows, zeros, powers]
    sorts = [x.astype(wide).astype(dtype) for x in reals] + [x.view(dtype) for x in (bits, low)]
    picked = random.integers(0, len(sorts), shape) if seed % 4 == 0 else seed % len(sorts)
    chosen = np.choose(picked, [x.view(bits.dtype) for x in sorts]).view(dtype)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32).astype(dtype)
    rare = special[random.integers(0, 2 if seed % 2 else 5, shape)]
    chosen = np.where(random.random(shape) < 0.03, rare, chosen)
    if seed % 2:
        chosen = np.where(np.isfinite(chosen), chosen, special[0])
    return np.asarray(chosen, dtype)


def found_by(
    values: np.ndarray, how: Reduction, *, mean: bool = False, gathered: bool = True, **rest: Any
) -> np.ndarray:
    """The product's result for arguments of `reference`."""
    spec = fold_spec(how)
    fields = {"divisor": len(values) if mean else None, "gathered": gathered}
    fields |= {name: rest.pop(name) for name in ("out_dtype", "cut_axis") if name in rest}
    spec = dataclasses.replace(spec, **fields)
    offset = rest.pop("places", 0)
    return run_fold(spec, values, batch_offset=offset, **rest)


def check(values: np.ndarray, how: Reduction, **rest: Any) -> None:
    """The product has the bits of the reference."""
    found = found_by(values, how, **rest)
    assert codes_of(found) == reference(list(values), how, **rest)


@st.composite
def wires(draw: st.DrawFn, orders: Any = None) -> Any:
    """A wire, or none; at hops only where an order has them."""
    hops = ["hops"] * (0 if orders in ("exact", "fixed") else 4)
    at = draw(st.sampled_from(["ends", "members", "result", *hops]))
    rounding = draw(st.sampled_from(["nearest", "nearest", "stochastic"]))
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return None
    if kind < 4:
        return Wire(draw(st.sampled_from([*FORMATS, *WIDE])), rounding=rounding, at=at)
    scale = draw(st.sampled_from(["amax", "floor", "ceil", "even"]))
    block = draw(st.sampled_from([None, "row", 1, 2, 3, 4, 7, 32]))
    return Wire(draw(st.sampled_from(FORMATS)), scale, block, rounding, at)


@st.composite
def reductions(draw: st.DrawFn, depth: int = 0) -> Reduction:
    """Sums of up to `depth` levels below the last one."""
    order = draw(st.sampled_from([*ORDERS, "exact", "fixed"]))
    rounding = draw(st.sampled_from(["nearest", "nearest", "stochastic"]))
    accumulate = draw(st.none() | st.sampled_from(ACCUMULATORS))
    if order == "fixed":
        rounding, accumulate = "nearest", draw(st.sampled_from([None, "int8", "int16", "int32"]))
    return Reduction(
        order=order,
        accumulate=accumulate,
        rounding=rounding,
        seed=draw(st.integers(0, 2**64 - 1)),
        wire=draw(wires(order)),
        groups_of=draw(st.integers(1, 5)) if depth else None,
        across=draw(reductions(depth - 1)) if depth else None,
    )


@st.composite
def cases(draw: st.DrawFn, depth: int = 0) -> tuple[np.ndarray, Reduction, dict[str, Any]]:
    how = draw(reductions(depth))
    dtype = draw(st.sampled_from(REALS))
    members = draw(st.integers(1, 9))
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    batch_ndim = draw(st.integers(0, min(1, len(shape))))
    options: dict[str, Any] = {
        "batch_ndim": batch_ndim,
        "mean": draw(st.booleans()),
        "gathered": draw(st.sampled_from([True, True, False])),
        "call": draw(st.integers(0, 3)),
        "places": draw(st.integers(0, 2**20)),
    }
    return numbers(draw(st.integers(0, 2**30)), (members, *shape), dtype), how, options


@settings(max_examples=budget(150, full=6000), deadline=None)
@given(cases())
def test_sums_have_the_bits_of_the_contract(case: Any) -> None:
    values, how, options = case
    check(values, how, **options)


@settings(max_examples=budget(150, full=6000), deadline=None)
@given(st.integers(1, 3).flatmap(cases))
def test_sums_in_levels_have_the_bits_of_the_contract(case: Any) -> None:
    values, how, options = case
    check(values, how, **options)


def rounded(x: Any, wire: Wire) -> np.ndarray:
    """W(x) of a value that two members send round."""
    x = np.asarray(x)
    both = np.stack([x, np.full_like(x, -0.0)])  # x - 0 is x, also of x = -0
    how = Reduction(wire=dataclasses.replace(wire, at="result"))
    return np.asarray(collectives.psum(both, reduction=how).value)


def same(found: Any, expected: Any) -> None:
    """Equal values of one dtype, with equal signs of zeros; all NaNs are equal."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert codes_of(found) == codes_of(expected), (found, expected)


# Settings one by one

COUNTS, SIZES = [1, 2, 3, 5, 7, 8, 9], [0, 1, 7, 33, 100]


def every(full: bool) -> Any:
    """Settings: in the full run all, by default one of each format and rule."""
    number = 0
    for f, fmt in enumerate(FORMATS):
        for scale in (None, "amax", "floor", "ceil", "even"):
            for n, dtype in enumerate(REALS):
                number += 1
                if not full and (f + n) % len(REALS):
                    continue
                for c, count in enumerate(COUNTS if full else COUNTS[number % 7 :][:1]):
                    size = SIZES[(number + c) % 5] if full else SIZES[number % 4]
                    yield fmt, scale, dtype, count, size


@pytest.mark.parametrize("full", [False, *slow(True)])
def test_every_format_scale_member_and_size_has_the_bits_of_the_contract(full: bool) -> None:
    at = ["hops", "ends", "members", "result"]
    blocks: list[Any] = [None, 1, 3, 32, "row"]
    for number, (fmt, scale, dtype, count, size) in enumerate(every(full)):
        block = blocks[number % 5] if scale else None
        rounding = "stochastic" if number % 3 == 0 else "nearest"
        wire = Wire(fmt, scale, block, rounding, at[number % 4 if number % 2 else 0])
        order = ORDERS[number % len(ORDERS)]
        values = numbers(number, (count, size), dtype)
        check(values, Reduction(order=order, seed=number, wire=wire), places=number)


@pytest.mark.parametrize("number", range(len(ORDERS)))
def test_groups_of_every_size_have_the_bits_of_the_contract(number: int) -> None:
    """8 members in groups of 1 to 9, and three levels; sums of lone members are rounded too."""
    order, dtype = ORDERS[number], REALS[number % len(REALS)]
    narrow = Wire("float8_e4m3fn", "even", 4, "stochastic")
    last = Reduction(order="ring", wire="bfloat16", seed=2)
    for of in range(1, 10):
        across = last if of % 2 else Reduction(groups_of=2, across=last, wire=narrow, seed=1)
        how = Reduction(order=order, wire=narrow, groups_of=of, across=across, accumulate="float16")
        values = numbers(100 * number + of, (8, 11), dtype)
        check(values, how, mean=of % 3 == 0, places=of)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (3, 0, 2), (0, 4)])
def test_scalars_and_empty_values_are_sums_too(shape: tuple[int, ...]) -> None:
    values = numbers(7, (3, *shape), FLOAT32)
    for block in (None, "row", 2):
        wire = Wire("float8_e4m3fn", "amax", block)
        for order in ORDERS:
            check(values, Reduction(order=order, wire=wire))
            across = Reduction(order="ring", wire=wire)
            check(values, Reduction(order=order, wire=wire, groups_of=2, across=across))


@settings(max_examples=budget(40, full=1500), deadline=None)
@given(reductions().filter(lambda how: how.order != "fixed"), st.integers(0, 2**30), st.data())
def test_slices_of_rings_are_messages(how: Reduction, seed: int, data: Any) -> None:
    """psum_scatter in ring order: slices of one axis are the blocks, and no result is sent."""
    members = data.draw(st.integers(1, 4))
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    axis = data.draw(st.integers(0, len(shape) - 1))
    shape[axis] = members * data.draw(st.integers(1, 2))
    values = numbers(seed, (members, 2, *shape), data.draw(st.sampled_from(REALS)))
    how = dataclasses.replace(how, order="ring")
    check(values, how, batch_ndim=1, cut_axis=axis, gathered=False, places=np.array([5, 2**40]))


@settings(max_examples=budget(40, full=1500), deadline=None)
@given(st.integers(0, 2).flatmap(cases), st.integers(1, 40), st.integers(1, 40))
def test_the_bits_do_not_depend_on_how_the_work_is_cut(case: Any, sent: int, block: int) -> None:
    values, how, options = case
    expected = found_by(values, how, **options)
    with fold_limits(SENT_BLOCK=sent, BLOCK=block):
        same(found_by(values, how, **options), expected)


@pytest.mark.parametrize("order", ["linear", "ring", "tree", ORDERS[6]])
def test_layouts_and_many_threads_have_the_same_bits(order: Any) -> None:
    values = numbers(1, (5, 3, 700), FLOAT32)
    wire = Wire("float8_e4m3fn", "amax", 32, "stochastic")
    how = Reduction(order=order, wire=wire, groups_of=2, across=Reduction(wire=wire))
    expected = found_by(values, how, batch_ndim=1)
    spec = fold_spec(how)
    for members in (
        list(values),
        np.asfortranarray(values),
        [np.repeat(value[..., None], 3, -1)[..., 1] for value in values],
        values[::-1].copy()[::-1],
    ):
        before = [np.array(member) for member in members]
        same(run_fold(spec, members, batch_ndim=1), expected)
        for member, copy in zip(members, before, strict=True):
            same(member, copy)
    out = np.empty_like(expected)
    with threads.limited(3), fold_limits(SENT_BLOCK=64):
        assert run_fold(spec, values, batch_ndim=1, out=out) is out
    same(out, expected)


# What is sent


def test_hops_of_chains_trees_and_binary_trees() -> None:
    """In the words of the contract, with W as `round_to`."""
    x = list(numbers(2, (5, 40), FLOAT32))
    wire = Wire("float8_e5m2")

    def w(value: np.ndarray) -> np.ndarray:
        return gpusim.round_to(value, "float8_e5m2").astype(np.float32)

    def total(order: Any, members: int) -> np.ndarray:
        return found_by(np.stack(x[:members]), Reduction(order=order, wire=wire))

    same(total("linear", 3), w(w(w(x[0]) + x[1]) + x[2]))
    same(total("reverse", 3), w(w(w(x[2]) + x[1]) + x[0]))
    same(total("tree", 4), w((x[0] + w(x[1])) + w(x[2] + w(x[3]))))
    same(total("tree", 5), w(((x[0] + w(x[1])) + w(x[2] + w(x[3]))) + w(x[4])))
    same(total(Schedule((Case(Binary()),)), 4), w(w(x[2]) + (w(w(x[3]) + x[1]) + x[0])))
    ring = [w(w(w(x[b]) + x[(b + 1) % 3]) + x[(b + 2) % 3])[b::3] for b in range(3)]
    interleaved = np.stack(x[:3])[:, np.argsort(np.arange(39) % 3, kind="stable")]
    same(
        found_by(interleaved[:, :39], Reduction(order="ring", wire=wire)),
        np.concatenate([part[:13] for part in ring]),
    )
