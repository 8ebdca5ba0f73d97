"""Folds with a wire by compiled kernels: the bits of NumPy's, over tiles, orders and formats."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim import Format, Wire
from gpusim.fallback import run_fold, sends
from gpusim.fallback.kernels import chosen
from gpusim.fallback.schedules import Binary, Case, Schedule, Walk
from gpusim.fallback.spec import FoldSpec
from gpusim.fallback.wires import WireInfo, round_to_wire
from tests.contract.kernel_sets import on_every_set
from tests.oracles.budget import budget

SOURCES = ["float32", "float16", "float8_e4m3fn"]
FORMATS: list[Any] = [
    *("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float6_e2m3fn", "float4_e2m1fn", "mxint8", "int8", "int4"),
    Format(8, 3),  # exponents as float32's
    Format(7, 22, bias=30),  # one bit fewer
    Format(6, 12, bias=40),
    Format(2, 1),
    Format(3, 0),
    Format(4, 2, has_subnormals=False),
    Format(3, 4, has_negative_zero=False, has_infinities=False),
]
ORDERS: list[Any] = [
    *("linear", "reverse", "ring", "tree"),
    Schedule((Case(Binary()),)),
    Schedule((Case(Walk(start=2, step=-1)),)),
]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def wire_of(form: Any, **settings: Any) -> WireInfo:
    info: WireInfo = Wire(form, **settings).info
    return info


def one_nan(found: np.ndarray) -> np.ndarray:
    """NaNs may differ in their bits: with one for all, results are compared as memory, fast."""
    found[np.isnan(found)] = np.nan
    return found


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_numbers_between_those_of_a_format_are_sent_alike(form: Any, rounding: str) -> None:
    """Ties, their neighbours, and numbers beyond both ends of the format."""
    bits = np.arange(2**16, dtype=np.uint32) << 16  # bfloat16's numbers have all exponents
    x = np.stack([bits, bits + 0x8000, bits + 0x7FFF, bits + 0x8001, bits - 1]).view(np.float32)
    largest = wire_of(form).info.largest
    more = np.linspace(0, 1.2 * min(largest, 1e38), 2**16, dtype=np.float32)
    for values in (x, more, -more):
        wire = wire_of(form, rounding=rounding)
        on_every_set(lambda v=values, w=wire: one_nan(round_to_wire(v, w, seed=3)))


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("at", ["hops", "ends", "members"])
def test_one_kernel_folds_an_unscaled_wire(
    order: Any, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def walk(*_: Any) -> None:
        raise AssertionError("the fold goes step by step")

    x = np.random.default_rng(0).standard_normal((5, 2, 2100)).astype(np.float32)
    spec = FoldSpec(order=order, wire=wire_of("float8_e4m3fn", at=at))
    with chosen("numpy"):
        expected = run_fold(spec, x, batch_ndim=1)
    monkeypatch.setattr(sends.Level, "fold", walk)
    with chosen("compiled"):
        assert run_fold(spec, x, batch_ndim=1).tobytes() == expected.tobytes()


@settings(max_examples=budget(250), deadline=None)
@given(st.data())
def test_folds_over_several_tiles(data: Any) -> None:
    """Blocks of rings that begin inside tiles, and random numbers that go on from tile to tile."""
    draw = data.draw
    source, form = draw(st.sampled_from(SOURCES)), draw(st.sampled_from(FORMATS))
    members = draw(st.integers(2, 19))
    shape = (members, 2, draw(st.sampled_from([2047, 2049, 4100])))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    x = np.ldexp(rng.standard_normal(shape), rng.integers(-6, 3, shape)).astype("f4")
    x = x.astype(dtype_of(source))
    wire = wire_of(
        form,
        rounding=draw(st.sampled_from(["nearest", "stochastic"])),
        at=draw(st.sampled_from(["hops", "hops", "ends", "members"])),
    )
    spec = FoldSpec(
        order=draw(st.sampled_from(ORDERS)),
        wire=wire,
        accumulate=draw(st.sampled_from([None, "float32", "float16"])),
        out_dtype=dtype_of(draw(st.sampled_from(["float32", "bfloat16", "float8_e5m2"]))),
        rounding=draw(st.sampled_from(["nearest", "stochastic"])),
        divisor=draw(st.sampled_from([None, members])),
        gathered=draw(st.booleans()),
        seed=draw(st.integers(0, 2**64 - 1)),
    )
    given: Any = x
    if draw(st.booleans()):  # in arrays of their own, whose elements are not side by side
        given = [np.repeat(member[..., None], 3, -1)[..., 1] for member in x]
    places = np.array([5, 2**40])
    on_every_set(lambda: one_nan(run_fold(spec, given, batch_ndim=1, call=2, batch_offset=places)))


def test_slices_of_a_ring_draw_the_numbers_of_their_elements() -> None:
    x = np.random.default_rng(1).standard_normal((3, 700, 6, 2)).astype(np.float32)
    for axis, at in itertools.product((0, 1), ("hops", "members")):
        wire = wire_of("bfloat16", rounding="stochastic", at=at)
        length = 699 if axis == 0 else 700
        spec = FoldSpec(order="ring", cut_axis=axis, wire=wire, gathered=False)
        on_every_set(lambda s=spec, n=length: run_fold(s, np.ascontiguousarray(x[:, :n])))
