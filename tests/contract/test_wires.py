"""Wires and levels: the bits of `wire_reference`, through every way to a sum on the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpusim
from gpusim import Format, Reduction, Wire, collectives, lax
from gpusim.collectives.fold import fold_spec
from gpusim.fallback import fold, run_fold, threads
from gpusim.fallback.schedules import Balanced, Binary, Case, Loops, Schedule, Segments, Tree, Walk
from gpusim.twins import TWINS
from tests.contract import wire_reference
from tests.contract.fold_limits import fold_limits
from tests.contract.kernel_sets import on_every_set, runs_every_set
from tests.contract.wire_reference import reference
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
    Format(7, 22, bias=30),  # one bit fewer than float32
]
WIDE: list[Any] = ["float32", "float64", Format(8, 30)]
SCHEDULES: dict[str, Any] = {
    "down": Walk(start=-1, step=-1),
    "from the second": Walk(start=1),
    "gloo's ring": Walk(start=-1, step=-1, cut=Segments(most=16)),
    "a ring the other way": Walk(start=2, step=-1, cut=Balanced()),
    "NCCL's ring": Walk(start=1, cut=Loops(chunk=16, align=4, channels=2)),
    "loops of one chain": Walk(cut=Loops(chunk=64, align=16, channels=2)),
    "pairs first": Tree(pairs_first=True),
    "a tree": Tree(),
    "a binary tree": Binary(),
}
ORDERS: list[Any] = ["linear", "reverse", "tree", "ring"]
ORDERS += [Schedule((Case(each),)) for each in SCHEDULES.values()]
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
    """The product has the bits of the reference, on all sets of kernels."""
    found = on_every_set(lambda: found_by(values, how, **rest))
    assert codes_of(found) == reference(list(values), how, **rest)


@st.composite
def wires(draw: st.DrawFn, orders: Any = None) -> Any:
    """A wire, or none; at hops only where an order has them."""
    hops = ["hops"] * (0 if orders in ("exact", "fixed", "kahan", "neumaier") else 4)
    at = draw(st.sampled_from(["ends", "members", "result", *hops]))
    rounding = draw(st.sampled_from(["nearest", "nearest", "stochastic"]))
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return None
    if kind < 4:
        return Wire(draw(st.sampled_from([*FORMATS, *WIDE])), rounding=rounding, at=at)
    scale = draw(st.sampled_from(["amax", "floor", "ceil", "even", "nvfp4", "given"]))
    if scale == "nvfp4":
        return Wire("nvfp4", block=draw(st.sampled_from([1, 2, 3, 16])), rounding=rounding, at=at)
    if scale == "given":
        given = draw(st.sampled_from([1.0, 0.3, 2.0**-149, 2.0**100, 0.004]))
        return Wire(draw(st.sampled_from(FORMATS)), given, rounding=rounding, at=at)
    block = draw(st.sampled_from([None, "row", 1, 2, 3, 4, 7, 32]))
    return Wire(draw(st.sampled_from(FORMATS)), scale, block, rounding, at)


@st.composite
def reductions(draw: st.DrawFn, depth: int = 0, outer: bool = True) -> Reduction:
    """Sums of up to `depth` levels below the last one."""
    order = draw(st.sampled_from([*ORDERS, "exact", "fixed", "kahan", "neumaier"]))
    rounding = draw(st.sampled_from(["nearest", "nearest", "stochastic"]))
    accumulate = draw(st.none() | st.sampled_from(ACCUMULATORS))
    if order == "fixed":
        rounding, accumulate = "nearest", draw(st.sampled_from([None, "int8", "int16", "int32"]))
    if order in ("kahan", "neumaier"):
        rounding = "nearest"
    return Reduction(
        order=order,
        accumulate=accumulate,
        rounding=rounding,
        seed=draw(st.integers(0, 2**64 - 1)),
        wire=draw(wires(order)),
        groups_of=draw(st.integers(1, 5)) if depth else None,
        across=draw(reductions(depth - 1, False)) if depth else None,
        divide=draw(st.sampled_from(["result", "result", "members"])) if outer else "result",
    )


@st.composite
def cases(draw: st.DrawFn, depth: int = 0) -> tuple[np.ndarray, Reduction, dict[str, Any]]:
    how = draw(reductions(depth))
    how = dataclasses.replace(how, divide=draw(st.sampled_from(["result", "result", "members"])))
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
    if not depth:
        options["out_dtype"] = draw(st.none() | st.sampled_from(REALS))
    return numbers(draw(st.integers(0, 2**30)), (members, *shape), dtype), how, options


@runs_every_set
@settings(max_examples=budget(1000), deadline=None)
@given(cases())
def test_sums_have_the_bits_of_the_contract(case: Any) -> None:
    values, how, options = case
    check(values, how, **options)


@runs_every_set
@settings(max_examples=budget(1000), deadline=None)
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


@runs_every_set
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


@runs_every_set
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


@runs_every_set
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (3, 0, 2), (0, 4)])
def test_scalars_and_empty_values_are_sums_too(shape: tuple[int, ...]) -> None:
    values = numbers(7, (3, *shape), FLOAT32)
    for block in (None, "row", 2):
        wire = Wire("float8_e4m3fn", "amax", block)
        for order in ORDERS:
            check(values, Reduction(order=order, wire=wire))
            across = Reduction(order="ring", wire=wire)
            check(values, Reduction(order=order, wire=wire, groups_of=2, across=across))


@runs_every_set
@settings(max_examples=budget(400), deadline=None)
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


@settings(max_examples=budget(400), deadline=None)
@given(st.integers(0, 2).flatmap(cases), st.integers(1, 40), st.integers(1, 40))
def test_the_bits_do_not_depend_on_how_the_work_is_cut(case: Any, sent: int, block: int) -> None:
    values, how, options = case
    expected = found_by(values, how, **options)
    with fold_limits(SENT_BLOCK=sent, BLOCK=block):
        same(found_by(values, how, **options), expected)


@pytest.mark.parametrize("order", ["linear", "ring", "tree", ORDERS[6]])
def test_layouts_and_many_threads_have_the_same_bits(order: Any) -> None:
    values = numbers(1, (5, 3, 200), FLOAT32)
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


def test_members_are_sent_and_their_own_share_too() -> None:
    x = numbers(2, (3, 40), FLOAT32)
    sent = gpusim.round_to(x, "float8_e5m2").astype(np.float32)
    for order in [*ORDERS, "exact"]:
        only = Wire("float8_e5m2", at="members")
        total = found_by(sent, Reduction(order=order))
        same(found_by(x, Reduction(order=order, wire=only)), total)
        both = dataclasses.replace(only, at="ends")
        same(found_by(x, Reduction(order=order, wire=both)), rounded(total, both))


def test_the_result_is_sent_after_the_division_and_the_rounding_to_its_type() -> None:
    x = np.array([[1.0], [2.0], [2.0]], np.float16)
    at = Reduction(wire=Wire("float8_e4m3fn", at="result"), accumulate="float32")
    mean = np.float16(5 / 3)
    expected = gpusim.round_to(np.array([mean]), "float8_e4m3fn").astype(np.float16)
    same(found_by(x, at, mean=True), expected)
    same(found_by(x, at), np.array([5], np.float16))
    wide = Reduction(wire="float32", accumulate="float32")
    same(found_by(x, wide, mean=True), np.array([mean]))


def test_a_result_of_slices_is_not_sent() -> None:
    """Neither in one level nor in several."""
    x = np.float32([[1, 1.0625], [1, 1.0625]])
    for how in (
        Reduction(wire=Wire("float8_e5m2", at="result")),
        Reduction(groups_of=1, across=Reduction(wire=Wire("float8_e5m2", at="result"))),
        Reduction(wire=Wire("float8_e5m2", at="result"), groups_of=2, across=Reduction()),
    ):
        sent = collectives.psum(x, reduction=how).value
        same(sent, np.float32([2, 2]))
        kept = collectives.psum_scatter(x, reduction=how, tiled=True).value
        same(np.asarray(kept).reshape(-1), np.float32([2, 2.125]))


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_one_member_alone_sends_nothing(dtype: np.dtype[Any]) -> None:
    x = numbers(4, (1, 9), dtype)
    for at in ("hops", "ends", "members", "result"):
        same(found_by(x, Reduction(wire=Wire("float4_e2m1fn", "floor", at=at))), x[0])
    groups = collectives.psum(
        np.repeat(x, 3, axis=0), groups=[[1], [2, 0]], reduction=Reduction(wire="float8_e5m2")
    ).value
    same(np.asarray(groups)[1], x[0])


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", "bool"])
def test_integers_are_sent_as_they_are(dtype: str) -> None:
    x = (np.arange(35) * 37 % 256).reshape(5, 7).astype(dtype)
    wire = Wire("float4_e2m1fn", "amax", 3, "stochastic")
    expected = collectives.psum(x).value
    for how in (
        Reduction(wire=wire),
        Reduction(order="ring", wire=wire, groups_of=2, across=Reduction(wire=wire)),
    ):
        same_integers = np.asarray(collectives.psum(x, reduction=how).value)
        assert same_integers.dtype == expected.dtype
        assert same_integers.tolist() == np.asarray(expected).tolist()


def test_a_sum_from_zero_has_no_minus_zero() -> None:
    x = np.full((4, 6), -0.0, np.float32)
    for each in SCHEDULES.values():
        how = Reduction(order=Schedule((Case(each),), from_zero=True), wire="float8_e5m2")
        assert not np.signbit(found_by(x, how)).any()
        check(x, how)
        check(x, dataclasses.replace(how, groups_of=2, across=Reduction()))
        check(np.negative(x), dataclasses.replace(how, groups_of=3, across=how))


@runs_every_set
@pytest.mark.parametrize("name", sorted(TWINS))
def test_twins_may_have_wires_and_levels(name: str) -> None:
    for number, count in enumerate((2, 3, 4, 8)):
        wire = Wire.mx("float8_e4m3fn", at=["hops", "ends"][number % 2], rounding="stochastic")
        values = numbers(number, (count, [700, 5, 40, 1][number]), FLOAT32)
        how = Reduction(order=name, wire=wire, seed=number)
        check(values, how)
        check(values, dataclasses.replace(how, groups_of=2, across=how))


def test_loops_are_messages_also_where_all_start_at_one_member() -> None:
    """Two channels of four elements, each of which fits into the first member's chunk."""
    x = np.zeros((3, 8), np.float32)
    x[0] = [100, 1, 1, 1, 1, 1, 1, 1]
    order = Schedule((Case(SCHEDULES["loops of one chain"]),))
    wire = Wire("int4", "floor")
    expected = np.float32([96, 0, 0, 0, 1, 1, 1, 1])
    same(found_by(x, Reduction(order=order, wire=wire)), expected)
    across = Reduction(order=order, groups_of=2, across=Reduction(wire=wire))
    same(found_by(x, across), expected)


@pytest.mark.parametrize("accumulate", [Format(5, 3), np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_lone_members_are_rounded_to_the_accumulator(accumulate: Any, rounding: str) -> None:
    """Three groups of one, one group of one, and a last group of one; the level across has the
    accumulator's type."""
    values = numbers(2, (3, 40), FLOAT32)
    values[:, ::3] = numbers(5, (3, 14), FLOAT32)
    for count, of in ((3, 1), (1, 4), (3, 2)):
        for order in ("linear", "ring", "exact"):
            how = Reduction(
                order=order,
                accumulate=accumulate,
                rounding=rounding,
                groups_of=of,
                across=Reduction(order="tree"),
            )
            check(values[:count], how)
            if count == 1 and rounding == "nearest":
                once = gpusim.round_to(values[0], accumulate).astype(np.float32)
                same(found_by(values[:1], how), once)


def test_across_has_the_default_accumulator_of_the_groups_type() -> None:
    """bfloat16 sums are added in float32, with own hops in bfloat16, exactly with one rounding."""
    x = np.full((600, 1), 1, np.float32)
    narrow = {"accumulate": ml_dtypes.bfloat16, "groups_of": 1}
    same(found_by(x, Reduction(across=Reduction(), **narrow)), np.float32([600]))
    own = Schedule((Case(Walk()),), hops="own")
    same(found_by(x, Reduction(across=Reduction(order=own), **narrow)), np.float32([256]))
    z = np.float32([[3.0], [0.25], [0.25]])  # sums of groups have three fraction bits
    two = Reduction(order="exact", groups_of=3, across=Reduction())
    same(
        found_by(z, Reduction(accumulate=Format(5, 3), groups_of=1, across=two)), np.float32([3.5])
    )
    z[1:] = 0.0625
    same(found_by(z, Reduction(accumulate=Format(5, 3), groups_of=1, across=two)), np.float32([3]))
    y = np.array([[1.0], [2.0**-8], [2.0**-40]]).astype(ml_dtypes.bfloat16)  # above a tie
    exact = Reduction(groups_of=1, across=Reduction(order="exact"))
    same(found_by(y, exact), np.array([1 + 2.0**-7]).astype(ml_dtypes.bfloat16))


# Ways to a sum


@runs_every_set
@settings(max_examples=budget(500), deadline=None)
@given(st.integers(0, 2).flatmap(reductions), st.integers(0, 2**30), st.data())
def test_stacked_collectives_have_the_bits_of_the_contract(
    how: Reduction, seed: int, data: Any
) -> None:
    """Groups of all sizes, other mapped axes, means; arrays, and lists of one for each replica."""
    replicas, batch = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 2))
    dtype = data.draw(st.sampled_from(REALS))
    values = numbers(seed, (replicas, batch, 7), dtype)
    assignment = data.draw(st.permutations(range(replicas)))
    cuts = sorted(data.draw(st.sets(st.integers(1, replicas)))) if replicas > 1 else []
    groups = [list(g) for g in np.split(np.array(assignment), cuts) if len(g)]
    mean, listed = data.draw(st.booleans()), data.draw(st.booleans())
    collective = collectives.pmean if mean else collectives.psum
    given = list(values) if listed else values
    options: Any = {"groups": groups, "batch_ndim": 1, "reduction": how}
    found = on_every_set(lambda: np.stack(collective(given, **options).value))
    for g, group in enumerate(groups):
        places = np.arange(batch) * len(groups) + g
        expected = reference(list(values[group]), how, mean=mean, batch_ndim=1, places=places)
        for replica in group:
            assert codes_of(found[replica]) == expected


@runs_every_set
@settings(max_examples=budget(500), deadline=None)
@given(st.integers(0, 2).flatmap(reductions), st.integers(0, 2**30), st.data())
def test_scattered_sums_have_the_bits_of_the_contract(how: Reduction, seed: int, data: Any) -> None:
    """The slices of a sum that is not sent; a ring's blocks are the slices, except in levels."""
    replicas, axis = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 1))
    shape = [3, 3]
    shape[axis] = replicas * data.draw(st.integers(1, 2))
    values = numbers(seed, (replicas, *shape), data.draw(st.sampled_from(REALS)))
    cut = axis if how.order == "ring" else None
    expected = reference(list(values), how, gathered=False, cut_axis=cut)
    options: Any = {"scatter_dimension": axis, "tiled": True, "reduction": how}
    found = on_every_set(lambda: collectives.psum_scatter(values, **options).value)
    whole = np.concatenate(list(found), axis=axis)
    assert codes_of(whole) == expected


@pytest.mark.parametrize("run", [gpusim.vmap, gpusim.pmap])
@pytest.mark.parametrize("levels", [False, True])
def test_maps_have_the_bits_of_the_contract(run: Any, levels: bool) -> None:
    """A map in a map: the place counts the outer axis, and the context counts leaves as calls."""
    values = numbers(21, (2, 6, 2, 5), FLOAT32)
    wire = Wire("float8_e4m3fn", "amax", 4, "stochastic")
    how = Reduction(order="ring", seed=3, wire=wire)
    if levels:  # random numbers are drawn across only
        how = Reduction(order="ring", accumulate="float16", groups_of=4, across=how)
    groups = [[0, 5], [1], [4, 2, 3]]

    def sums(x: Any) -> Any:
        both = lax.psum((x, x), "i"), lax.pmean(x, "i")
        return both, lax.psum(x, "i", reduction=how, axis_index_groups=groups)

    with gpusim.reduction(how) as state:
        nested = run(run(sums, axis_name="i"), axis_name="o")(values)
        assert state.calls == 3
    ((first, second), mean), grouped = nested
    for outer in range(2):
        members = list(values[outer])
        for call, (found, is_mean) in enumerate([(first, 0), (second, 0), (mean, 1)]):
            expected = reference(members, how, mean=bool(is_mean), call=call, places=outer)
            for inner in range(6):
                assert codes_of(np.asarray(found[outer][inner])) == expected
        for g, group in enumerate(groups):
            chosen = [members[m] for m in group]
            expected = reference(chosen, how, places=outer * len(groups) + g)
            for inner in group:
                assert codes_of(np.asarray(grouped[outer][inner])) == expected


def test_a_context_has_wires_and_levels() -> None:
    values = numbers(3, (5, 8), FLOAT32)
    total = gpusim.vmap(lambda x: lax.psum(x, "i"), out_axes=None, axis_name="i")
    how = Reduction(order="ring", wire="bfloat16", groups_of=2, across=Reduction(order="tree"))
    with gpusim.reduction(how):
        assert codes_of(np.asarray(total(values))) == reference(list(values), how)
    with gpusim.reduction(order="tree", wire=Wire.mx("int8")):
        expected = reference(
            list(values), Reduction(order="tree", wire=Wire("mxint8", "floor", 32))
        )
        assert codes_of(np.asarray(total(values))) == expected


# What is refused

F32 = np.ones((3, 4), np.float32)
BF16 = Reduction(wire="bfloat16")
LEVELS: dict[str, Any] = {"groups_of": 2, "across": Reduction()}
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: Reduction(op="max", wire="bfloat16"), ValueError, "op='max'"),
    (lambda: Reduction(op="prod", **LEVELS), ValueError, "op='prod'"),
    (lambda: Reduction(groups_of=2, across=Reduction(op="max")), ValueError, "op="),
    (lambda: Reduction(order="engine", wire="bfloat16"), ValueError, "order='engine'"),
    (lambda: Reduction(order="engine", **LEVELS), ValueError, "order='engine'"),
    (lambda: Reduction(groups_of=2, across=Reduction(order="engine")), ValueError, "'engine'"),
    (lambda: Reduction(order="exact", wire="bfloat16"), ValueError, "at='hops'"),
    (lambda: Reduction(order="fixed", wire="bfloat16"), ValueError, "at='hops'"),
    (lambda: Reduction(groups_of=2), ValueError, "across=None"),
    (lambda: Reduction(across=Reduction()), ValueError, "groups_of=None"),
    (lambda: Reduction(groups_of=0, across=Reduction()), ValueError, "groups_of=0"),
    (lambda: Reduction(groups_of=2.5, across=Reduction()), ValueError, "groups_of=2.5"),
    (lambda: Reduction(groups_of=True, across=Reduction()), ValueError, "groups_of=True"),
    (lambda: Reduction(groups_of=2, across=3), TypeError, "across: expected a gpusim.Reduction"),
    (lambda: Wire("float32", "amax"), ValueError, "scale='amax'"),
    (lambda: Wire("float64", "floor"), ValueError, "scale='floor'"),
    (lambda: Wire(Format(8, 23), "even"), ValueError, "scale='even'"),
    (lambda: Wire("bfloat16", block=3), ValueError, "block=3"),
    (lambda: Wire("bfloat16", "amax", 0), ValueError, "block=0"),
    (lambda: Wire("bfloat16", "amax", "column"), ValueError, "block='column'"),
    (lambda: Wire("bfloat16", "mean"), ValueError, "scale='mean'"),
    (lambda: Wire("bfloat16", rounding="up"), ValueError, "rounding='up'"),
    (lambda: Wire("bfloat16", at="start"), ValueError, "at='start'"),
    (lambda: Wire(Format(4, 3, is_signed=False)), ValueError, "unsigned"),
    (lambda: Wire("int32"), TypeError, "int32"),
    (lambda: Wire("complex64"), TypeError, "complex64"),
    (lambda: Wire("bool"), TypeError, "bool"),
    (lambda: Wire("float7"), TypeError, "float7"),
    (lambda: Reduction(wire="int32"), TypeError, "int32"),
    (lambda: Wire.mx("bfloat16"), ValueError, "bfloat16"),
    (lambda: found_by(F32.astype(complex), BF16), TypeError, "complex128"),
    (lambda: found_by(F32.astype("c8"), Reduction(**LEVELS)), TypeError, "complex64"),
    *(
        (lambda how=how, part=part: fold(F32, **how, **part), ValueError, "wire, groups_of")
        for how in ({"wire": BF16.wire.info}, {"groups_of": 2, "across": fold_spec(Reduction())})
        for part in (
            {"final": False},
            {"partial": F32[0], "before": 1},
            {"window": (0, 4)},
            {"order": "tree", "nodes": (0, 0, 3)},
        )
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_has_no_meaning_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
