"""Wires and levels by the kernels, compiled for the host, have the bits of fallback."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim import Reduction, Wire
from gpusim.collectives.fold import fold_spec
from gpusim.cuda import templates
from gpusim.cuda.device import Kernel
from gpusim.fallback import FoldPart, run_fold
from gpusim.fallback.wires import WireInfo, round_to_wire
from tests.contract.test_wires import FORMATS, ORDERS, REALS, WIDE, cases, every, numbers
from tests.cuda.host_cuda.device import HostDevice
from tests.cuda.host_cuda.values import same
from tests.oracles.budget import budget, slow

DEVICE = HostDevice()
RING = next(order for order in ORDERS if order == "ring")


def check(
    values: Any, how: Reduction, device: HostDevice = DEVICE, *, of: Any = None, **rest: Any
) -> None:
    """The device has fallback's bits; `of` are the same members in another layout."""
    fields = {name: rest.pop(name) for name in _FIELDS if name in rest}
    if rest.pop("mean", False):
        fields["divisor"] = len(values)
    rest["batch_offset"] = rest.pop("places", 0)
    spec = dataclasses.replace(fold_spec(how), **fields)
    found = device.run_fold(spec, values if of is None else of, **rest)
    same(found, run_fold(spec, values, **rest))


_FIELDS = ("gathered", "out_dtype", "cut_axis", "divisor")


@settings(max_examples=budget(1000), deadline=None)
@given(st.integers(0, 3).flatmap(cases))
def test_sums_in_levels_have_the_bits_of_fallback(case: Any) -> None:
    values, how, options = case
    check(values, how, **options)


@pytest.mark.parametrize("share", [37, *slow(1)])
def test_every_format_scale_member_and_size_has_the_bits_of_fallback(share: int) -> None:
    at = ["hops", "ends", "members", "result"]
    blocks: list[Any] = [None, 1, 3, 32, "row", 70]
    for number, (fmt, scale, dtype, count, size) in enumerate(every(True)):
        if number % share:
            continue
        block = blocks[number % 6] if scale else None
        rounding = "stochastic" if number % 3 == 0 else "nearest"
        wire = Wire(fmt, scale, block, rounding, at[number % 4 if number % 2 else 0])
        how = Reduction(order=ORDERS[number % len(ORDERS)], seed=number, wire=wire)
        values = numbers(number, (count, 2, size), dtype)
        check(values, how, batch_ndim=1, call=2, places=np.array([number, 2**40]))


@pytest.mark.parametrize("accumulate", [None, "float64"])
@pytest.mark.parametrize("wire", [None, Wire("bfloat16", at="ends"), Wire("float16", at="result")])
def test_schedules_that_add_exactly(wire: Wire | None, accumulate: str | None) -> None:
    """The twin of NVLS, which adds float32 alone."""
    nvls = Reduction.like("nccl-nvls-float32")
    how = dataclasses.replace(nvls, wire=wire, accumulate=accumulate)
    exact = dataclasses.replace(how, order="exact")
    values = numbers(1, (5, 300), np.dtype(np.float32))
    check(values, how)
    same(DEVICE.run_fold(fold_spec(how), values), run_fold(fold_spec(exact), values))
    with pytest.raises(TypeError, match=r"float16 members: .* known for float32"):
        DEVICE.run_fold(fold_spec(how), values.astype(np.float16))


@pytest.mark.parametrize("fmt", WIDE, ids=str)
def test_wires_of_32_bits_and_more(fmt: Any) -> None:
    for dtype, order, at in product(REALS, ("linear", "tree", RING), ("hops", "ends")):
        check(numbers(4, (5, 33), dtype), Reduction(order=order, wire=Wire(fmt, at=at)))
        narrow = Reduction(order=order, wire=Wire(fmt, at=at), accumulate="float16")
        check(numbers(5, (5, 33), dtype), narrow)


@pytest.mark.parametrize("scale", ["amax", "floor", "ceil", "even"])
@pytest.mark.parametrize("block", [31, 32, 33, 1024, 1025, "row", None])
def test_blocks_of_every_length(scale: str, block: Any) -> None:
    """Of a few threads, of a thread block, and in a workspace."""
    values = numbers(11, (3, 2, 5, 700), np.dtype(np.float32))
    wire = Wire("float8_e4m3fn", scale, block)
    for order in ("linear", RING, "tree"):
        device = HostDevice()
        check(values, Reduction(order=order, wire=wire), device, batch_ndim=1)
        assert len(device.launches) == 1
        drawn = dataclasses.replace(wire, rounding="stochastic")
        check(values, Reduction(order=order, wire=drawn, seed=5), batch_ndim=1, call=7)


def test_every_instance_runs_and_has_the_bits() -> None:
    device = HostDevice()
    scaled, drawn = Wire("float8_e5m2", "amax", 32), Wire("bfloat16", rounding="stochastic")
    for source, result in product(REALS, REALS):
        values = numbers(3, (3, 80), source)
        for accumulate, order in product((np.float32, np.float16, np.float64), ("ring", "tree")):
            for wire in (scaled, dataclasses.replace(scaled, at="result"), Wire("bfloat16"), drawn):
                how = Reduction(order=order, wire=wire, accumulate=accumulate)
                check(values, how, device, out_dtype=result, divisor=3)
        for wire in (None, Wire("float8_e5m2", "amax", at="ends")):
            how = Reduction(order="fixed", wire=wire)
            check(values, how, device, out_dtype=result, divisor=3)
    launched: set[Kernel] = {launch.kernel for launch in device.launches}
    units = templates.units()
    expected = {*units["chain"], *units["machine"], *units["fixed"]}
    assert launched >= expected, expected - launched


COUNTED = [
    Wire("bfloat16"),
    Wire("bfloat16", at="ends"),
    Wire("float16", rounding="stochastic"),
    Wire("float8_e4m3fn", "amax", 32),
    Wire("float8_e4m3fn", "floor", 32, at="ends"),
    Wire("int4", "amax", "row", at="members"),
    Wire("int8", "even", 1000),
    Wire("float8_e5m2", "amax"),
]


@pytest.mark.parametrize("members", [2, 3, 5, 8, 64, *slow(512)])
@pytest.mark.parametrize("wire", COUNTED, ids=str)
def test_a_fold_with_a_wire_is_one_launch(wire: Wire, members: int) -> None:
    orders = ORDERS if members < 64 else ["linear", "reverse", "ring", "tree", ORDERS[-2]]
    for dtype, order in zip(REALS * 2, orders, strict=False):
        device = HostDevice()
        values = numbers(members, (members, 1100), dtype)
        check(values, Reduction(order=order, wire=wire, seed=1), device)
        assert len(device.launches) == 1, (order, device.launches)
    for divide in ("members", "result"):
        device = HostDevice()
        check(values, Reduction(wire=wire, divide=divide), device, divisor=members, mean=True)
        assert len(device.launches) == 1


def test_what_is_more_than_one_launch() -> None:
    """Exact sums and those of integers: the sends, the sum, and the result's send. Levels."""
    values = numbers(6, (8, 2, 70), np.dtype(np.float32))
    ends, hops = Wire("float8_e4m3fn", "amax", 16, at="ends"), Wire("bfloat16")
    for how, launches in (
        (Reduction(order="exact", wire=ends), 3),
        (Reduction(order="exact", wire=dataclasses.replace(ends, at="members")), 2),
        (Reduction(order="fixed", wire=ends), 3),
        (Reduction(order="kahan", wire=ends), 3),
        (Reduction(order="fixed"), 1),
        (Reduction(wire=dataclasses.replace(ends, at="result")), 2),
        (Reduction(wire=hops, groups_of=4, across=Reduction(wire=hops)), 4),
    ):
        device = HostDevice()
        check(values, how, device, batch_ndim=1)
        assert len(device.launches) == launches, how


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_slices_of_rings_are_messages(axis: int, rounding: str) -> None:
    shape = [3, 4, 5]
    shape[axis] = 6
    values = numbers(21, (3, 2, *shape), np.dtype(np.float16))
    for at, scale, gathered in product(("hops", "ends", "result"), (None, "amax"), (False, True)):
        for block in (None, 4, "row", 40) if scale else (None,):
            wire = Wire("float6_e2m3fn", scale, block, rounding, at)
            how = Reduction(order="ring", wire=wire, rounding=rounding, seed=9)
            options: dict[str, Any] = {"batch_ndim": 1, "places": np.array([5, 2**40])}
            check(values, how, cut_axis=axis, gathered=gathered, mean=True, **options)


def test_members_may_lie_anywhere() -> None:
    values = numbers(8, (5, 3, 70), np.dtype(np.float32))
    wire = Wire("int8", "amax", 16, "stochastic")
    how = Reduction(order="ring", wire=wire, groups_of=2, across=Reduction(wire=wire))
    for of in (
        list(values),
        np.asfortranarray(values),
        [np.repeat(member[..., None], 3, -1)[..., 1] for member in values],
        [np.asfortranarray(values[0]), *values[1:]],
    ):
        check(values, how, of=of, batch_ndim=1)
    out = np.empty((3, 70), np.float32)
    assert DEVICE.run_fold(fold_spec(how), values, batch_ndim=1, out=out) is out
    same(out, run_fold(fold_spec(how), values, batch_ndim=1))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (3, 0, 2), (0, 4)])
def test_scalars_and_empty_values(shape: tuple[int, ...]) -> None:
    values = numbers(7, (3, *shape), np.dtype(np.float32))
    for block, order in product((None, "row", 2), ORDERS):
        wire = Wire("float8_e4m3fn", "amax", block)
        check(values, Reduction(order=order, wire=wire))
        check(values, Reduction(order=order, wire=wire, groups_of=2, across=Reduction()))


def test_integers_are_sent_as_they_are() -> None:
    for dtype in (np.int8, np.int64):
        values = (np.arange(35) * 37 % 256).reshape(5, 7).astype(dtype)
        check(values, Reduction(wire="float8_e5m2", groups_of=2, across=Reduction()))


@pytest.mark.parametrize("fmt", [*FORMATS, *WIDE], ids=str)
def test_one_message_has_the_bits_of_fallback(fmt: Any) -> None:
    scales = (None,) if fmt in WIDE else (None, "amax", "floor", "ceil", "even")
    for number, (scale, dtype) in enumerate(product(scales, REALS)):
        block: Any = (None, 3, 32, "row", 100)[number % 5] if scale else None
        for rounding in ("nearest", "stochastic"):
            info: WireInfo = Wire(fmt, scale, block, rounding).info
            x = numbers(number, (2, 3, 37), dtype)
            how: dict[str, Any] = {"seed": 5, "step": 4, "call": 3, "batch_ndim": number % 2}
            how["place"] = np.array([7, 2**50]) if number % 2 else 6
            same(DEVICE.round_to_wire(x, info, **how), round_to_wire(x, info, **how))
    empty = np.zeros((0, 3), np.float32)
    same(DEVICE.round_to_wire(empty, Wire(fmt).info), empty)


def test_what_is_refused() -> None:
    values = np.ones((4, 3), np.float32)
    with pytest.raises(ValueError, match="for which its integers have room"):
        many = np.ones((65, 3), np.float32)
        DEVICE.run_fold(fold_spec(Reduction(order="fixed", accumulate="int8")), many)
    with pytest.raises(TypeError, match="complex64 members: expected real ones"):
        DEVICE.run_fold(fold_spec(Reduction(wire="float16")), values.astype(np.complex64))
    with pytest.raises(ValueError, match="folds in parts"):
        part = FoldPart(final=False)
        DEVICE.run_fold(fold_spec(Reduction(wire="float16")), values, part=part)
    with pytest.raises(TypeError, match="int32 given"):
        DEVICE.round_to_wire(values.astype(np.int32), Wire("float16").info)
