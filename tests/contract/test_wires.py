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

import fallback
import gpusim
from fallback import run_fold
from fallback.schedules import Balanced, Binary, Case, Loops, Schedule, Segments, Tree, Walk
from gpusim import Format, Reduction, Wire, collectives, lax
from gpusim.collectives.fold import fold_spec
from tests.contract import wire_reference
from tests.contract.wire_reference import reference
from tests.oracles.budget import budget
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
    "pairs first": Tree(pairs_first=True),
    "a tree": Tree(),
    "a binary tree": Binary(),
}
ORDERS: list[Any] = ["linear", "reverse", "tree", "ring"]
ORDERS += [Schedule((Case(fold),)) for fold in SCHEDULES.values()]
ORDERS += [Schedule((Case(Walk(start=-1, step=-1)),), hops="own")]
ACCUMULATORS: list[Any] = [*REALS, Format(6, 9), Format(5, 16, has_infinities=False)]


@np.errstate(over="ignore")
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
    at = draw(st.sampled_from(["ends", "members", "result"] + ["hops"] * 4 * (orders != "exact")))
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
    order = draw(st.sampled_from([*ORDERS, "exact"]))
    rounding = draw(st.sampled_from(["nearest", "nearest", "stochastic"]))
    accumulate = draw(st.none() | st.sampled_from(ACCUMULATORS))
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
