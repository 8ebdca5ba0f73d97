"""What a message becomes on a wire: cases by hand, and MX formats beside gfloat's."""

from __future__ import annotations

from typing import Any

import gfloat
import numpy as np
import pytest
from gfloat import formats as gfloat_formats
from hypothesis import given, settings
from hypothesis import strategies as st

import gpusim
from gpusim import Format, Reduction, Wire
from tests.contract.kernel_sets import on_every_set, runs_every_set
from tests.contract.test_wires import (
    FLOAT32,
    FORMATS,
    REALS,
    WIDE,
    check,
    found_by,
    numbers,
    rounded,
    same,
    wires,
)
from tests.contract.wire_reference import one_message
from tests.oracles.budget import SEED, budget
from tests.oracles.reference_fold import FLOATS, codes_of

DIRECT = [fmt for fmt in [*FORMATS, *WIDE] if isinstance(fmt, Format) or fmt in FLOATS]


@pytest.mark.parametrize("fmt", DIRECT, ids=str)
def test_without_a_scale_values_are_rounded_as_by_round_to(fmt: Any) -> None:
    x = numbers(15, (400,), np.dtype(np.float64))
    same(rounded(x, Wire(fmt)), gpusim.round_to(x, fmt).astype(np.float64))


INF, NAN = np.inf, np.nan
SMALLEST, LARGEST = 2.0**-149, float(np.finfo(np.float32).max)
BELOW_ONE = Format(2, 1, bias=5, has_infinities=False, high_nans=0)  # its largest number is 3/8

#: A wire, a float32 message and what arrives, by hand.
MESSAGES: list[tuple[Wire, list[float], list[float]]] = [
    # without a scale, what is too large becomes infinity or NaN; with one, the largest number
    (Wire("float8_e5m2"), [61439, 61440, -1e9], [57344, INF, -INF]),
    (Wire("float8_e4m3fn"), [463, 465, -INF], [448, NAN, NAN]),
    (Wire("float4_e2m1fn"), [6.9, 7.1, -0.0], [6, NAN, -0.0]),
    (Wire("int8"), [127.4, 127.6, -0.5, -1.5, -0.0], [127, NAN, 0, -2, 0]),
    (Wire("int8", "floor"), [127.6, -127.6, 1], [127, -127, 1]),
    (Wire("mxint8", "floor"), [1.999, -1.999, 1 / 64], [127 / 64, -127 / 64, 1 / 64]),
    (Wire("float8_e4m3fn", "floor"), [480, -500, 1], [448, -448, 1]),
    # the largest magnitude becomes the largest number
    (Wire("float8_e4m3fn", "amax"), [896, -1, 0.0, -0.0], [896, -1, 0.0, -0.0]),
    (Wire("int8", "amax"), [254, 3, 1, -1, -0.0], [254, 4, 0, 0, 0]),
    (Wire("int4", "amax", 2), [7, 3.4, 14, 3], [7, 3, 14, 4]),
    # zeros
    (Wire("float8_e4m3fn", "amax"), [0.0, -0.0], [0.0, -0.0]),
    (Wire("float8_e4m3fnuz", "ceil"), [0.0, -0.0], [0.0, 0.0]),
    (Wire("int4", "even"), [0.0, -0.0], [0.0, 0.0]),
    # infinity and NaN fill their block, and no other
    (Wire("float8_e5m2", "amax", 2), [1, INF, 2, 4, NAN, 0, 1], [NAN, NAN, 2, 4, NAN, NAN, 1]),
    (Wire("float8_e5m2", "floor", 2), [1, -INF, 2, 4], [NAN, NAN, 2, 4]),
    # the scales' limits
    (Wire("float8_e4m3fn", "amax"), [SMALLEST, -3 * SMALLEST], [SMALLEST, -3 * SMALLEST]),
    (Wire(BELOW_ONE, "amax"), [LARGEST, 1], [NAN, NAN]),
    (Wire(BELOW_ONE, "floor"), [LARGEST, 0], [1.5 * 2**125, 0]),
    (Wire("float8_e5m2", "floor"), [SMALLEST, -(2.0**-140)], [0.0, -(2.0**-140)]),
    (Wire("float8_e5m2", "floor"), [LARGEST, 2.0**98], [1.75 * 2**127, 2.0**98]),
    # floor, ceil and even, about powers of two: 2^8 is the largest one of float8_e4m3fn
    (Wire("float8_e4m3fn", "floor"), [256, 0.01], [256, 0.009765625]),
    (Wire("float8_e4m3fn", "ceil"), [256, 1 / 512], [256, 1 / 512]),
    (Wire("float8_e4m3fn", "ceil"), [257, 1 / 512], [256, 0.0]),
    (Wire("float8_e4m3fn", "even"), [495, 1 / 512], [448, 1 / 512]),
    (Wire("float8_e4m3fn", "even"), [496, 1 / 512], [512, 0.0]),
    (Wire("float4_e2m1fn", "even"), [6.99, 0.5], [6, 0.5]),
    (Wire("float4_e2m1fn", "even"), [7, 0.5], [8, 0.0]),
    (Wire("float4_e2m1fn", "floor"), [7.9, 0.5], [6, 0.5]),
    (Wire("float4_e2m1fn", "ceil"), [4.1, 0.5], [4, 0.0]),
]


@pytest.mark.parametrize(("wire", "message", "arrives"), MESSAGES, ids=str)
def test_messages_by_hand(wire: Wire, message: list[float], arrives: list[float]) -> None:
    same(rounded(np.float32(message), wire), np.float32(arrives))


def test_blocks_count_from_the_start_of_a_message_and_rows_end_in_it() -> None:
    """A ring of three: messages of 3, 3 and 2 elements of rows of four."""
    x = np.zeros((3, 2, 4), np.float32)
    x[0] = [[1, 1, 1, 100], [1, 1, 100, 1]]

    def arrives(block: Any, order: str = "ring") -> list[Any]:
        wire = Wire("int4", "floor", block, at="result")
        return found_by(x, Reduction(order=order, wire=wire)).tolist()

    assert arrives("row") == [[1, 1, 1, 96], [1, 1, 96, 0]]
    assert arrives(2) == [[1, 1, 1, 96], [0, 1, 96, 0]]
    assert arrives(None) == [[1, 1, 1, 96], [0, 0, 96, 0]]
    assert arrives("row", "linear") == [[0, 0, 0, 96], [0, 0, 96, 0]]
    assert arrives(2, "linear") == [[1, 1, 0, 96], [1, 1, 96, 0]]


def test_rows_across_are_those_of_the_value() -> None:
    """The second block of the groups' ring begins in the middle of the first row."""
    x = np.zeros((2, 2, 4), np.float32)
    x[0, :, :2] = 100
    x[0, :, 2:] = 1
    wire = Wire("int4", "floor", "row", at="result")
    for size in (8, 6):
        values = x.reshape(2, -1)[:, :size].reshape(2, -1, size // 2)
        check(values, Reduction(order="ring", groups_of=1, across=Reduction(wire=wire)))
    values = numbers(5, (4, 3, 5), FLOAT32)
    check(values, Reduction(order="ring", groups_of=2, across=Reduction(wire=wire)))


@runs_every_set
@settings(max_examples=budget(3000, most=100), deadline=None)
@given(wires().filter(bool), st.sampled_from(REALS), st.integers(0, 2**30))
def test_round_to_a_wire_is_one_message(wire: Wire, dtype: Any, seed: int) -> None:
    for shape in ((), (0,), (seed % 40,), (3, seed % 5), (2, 0)):
        x = numbers(seed, shape, dtype)
        found = on_every_set(lambda x=x: gpusim.round_to(x, wire, seed=seed))
        assert codes_of(found) == one_message(x, wire, seed)
    values = numbers(seed, (3, 9), dtype)
    expected = [one_message(x, wire, seed, replica) for replica, x in enumerate(values)]
    for run in (gpusim.vmap, gpusim.pmap):
        program = run(lambda x: gpusim.round_to(x, wire, seed=seed), axis_name="i")
        found = on_every_set(lambda program=program: program(values))
        assert [codes_of(message) for message in found] == expected


# MX, beside an independent package

ELEMENTS = {
    "float8_e4m3fn": gfloat_formats.format_info_mxfp8_e4m3,
    "float8_e5m2": gfloat_formats.format_info_mxfp8_e5m2,
    "float6_e2m3fn": gfloat_formats.format_info_mxfp6_e2m3,
    "float6_e3m2fn": gfloat_formats.format_info_mxfp6_e3m2,
    "float4_e2m1fn": gfloat_formats.format_info_mxfp4_e2m1,
    "int8": gfloat_formats.format_info_mxint8,
}


@runs_every_set
@pytest.mark.parametrize("name", ELEMENTS)
def test_mx_blocks_are_gfloats(name: str) -> None:
    """gfloat has the scale of the OCP specification, "floor"; elements of two's complement reach
    -2 there, and -127/64 here."""
    random = np.random.default_rng([SEED, list(ELEMENTS).index(name)])
    blocks = budget(4000, most=100)
    values = np.ldexp(random.normal(size=(blocks, 32)), random.integers(-9, 9, (blocks, 32)))
    values[::5] = np.round(values[::5] * 16) / 16  # ties, zeros
    values = np.ldexp(values, random.integers(-160, 110, (blocks, 1))).astype(np.float32)
    found = on_every_set(lambda: rounded(values.reshape(-1), Wire.mx(name))).reshape(blocks, 32)
    wanted = np.empty_like(found)
    for row, block in enumerate(values.astype(np.float64)):
        arrived = gfloat.quantize_block(ELEMENTS[name], block, gfloat.compute_scale_amax)
        if name == "int8":
            scale = gfloat.compute_scale_amax(ELEMENTS[name].etype.emax, block)
            arrived = np.maximum(arrived, -127 / 64 * scale) + 0.0
        wanted[row] = arrived
    same(found, wanted)
