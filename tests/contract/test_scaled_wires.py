"""Wires of two-level scales (NVFP4) and of given ones, and the short names of formats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpusim
from gpusim import Format, Reduction, Wire, collectives
from gpusim.formats import ALIASES, NAMED_FORMATS, ROUNDINGS, format_name
from tests.contract.fold_limits import fold_limits
from tests.contract.kernel_sets import on_every_set, runs_every_set
from tests.contract.test_wires import REALS, numbers
from tests.contract.wire_reference import one_message
from tests.cuda.host_cuda.device import HostDevice, has_compiler
from tests.cuda.host_cuda.values import same
from tests.oracles.reference_fold import codes_of

FP4, FP8 = np.dtype(ml_dtypes.float4_e2m1fn), np.dtype(ml_dtypes.float8_e4m3fn)


@runs_every_set
@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_messages_have_the_bits_of_rational_arithmetic(dtype: np.dtype[Any], rounding: str) -> None:
    wires = [Wire("nvfp4", block=block, rounding=rounding) for block in (1, 5, 16)]
    wires += [
        Wire(fmt, scale, rounding=rounding)
        for fmt in ("float8_e4m3fn", "int8", "float16", Format(9, 10))
        for scale in (1, 0.3, 2.0**-149, 3e38)
    ]
    for number, wire in enumerate(wires):
        for seed in (4, 5, 6, 8):
            x = numbers(seed, (3, 13), dtype)
            found = on_every_set(lambda x=x, w=wire, s=seed: gpusim.round_to(x, w, seed=s))
            assert codes_of(found) == one_message(x, wire, seed=seed), (number, seed)


@np.errstate(all="ignore")
def by_ml_dtypes(x: np.ndarray) -> np.ndarray:
    """NVFP4 in float32, by ml_dtypes' conversions, for a finite message."""
    unit = np.float32(np.abs(x).max() / np.float32(6 * 448))
    arrived = np.empty_like(x)
    for first in range(0, len(x), 16):
        block = x[first : first + 16]
        own = np.abs(block).max() / np.float32(6) / unit
        scale = min(own, np.float32(448)).astype(FP8).astype(np.float32)
        sent = np.clip(block / (scale * unit), -6, 6).astype(FP4).astype(np.float32)
        arrived[first : first + 16] = sent * scale * unit
    return arrived


def test_nvfp4_is_that_of_ml_dtypes_conversions() -> None:
    random = np.random.default_rng(0)
    for length in (16, 17, 100, 4096):
        x = random.normal(size=length).astype(np.float32) * 2.0 ** random.integers(-3, 4, length)
        x = x.astype(np.float32)
        same(gpusim.round_to(x, Wire("nvfp4")), by_ml_dtypes(x))


def test_nvfp4_at_the_edges() -> None:
    wire, x = Wire("nvfp4"), np.zeros(48, np.float32)
    x[:2], x[16], x[17], x[32] = (-0.0, 0.0), 2688.0, 1.0, -1e-30
    found = gpusim.round_to(x, wire)
    assert found[16] == 2688  # the largest number of the largest block: 6 * 448
    same(found[32:34], np.array([-0.0, 0.0], np.float32))  # of a block whose scale is zero
    same(found[:2], x[:2])
    same(gpusim.round_to(np.zeros(3, np.float32), wire), np.zeros(3, np.float32))
    assert gpusim.round_to(np.ones((0, 3), np.float32), wire).shape == (0, 3)
    same(gpusim.round_to(np.float32(-7), wire), np.array(-7, np.float32))
    for bad in (np.inf, np.nan):
        x[40] = bad
        assert np.isnan(gpusim.round_to(x, wire)).all()
    x[40] = 2.0**-149  # of the smallest numbers, whose products vanish, zeros arrive
    assert np.isfinite(gpusim.round_to(x[40:41], wire)).all()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("order", ["linear", "tree", "ring", "gloo-ring"])
def test_a_message_has_a_scale_of_its_own(order: str, rounding: str) -> None:
    """Blocks of a ring have; several in a part of the work, or one in each, have the same bits."""
    x = numbers(5, (5, 700), np.dtype(np.float32))
    wire = Wire("nvfp4", rounding=rounding, at="ends")
    how = Reduction(order=order, wire=wire, seed=3)
    whole = collectives.psum(x, reduction=how).value
    with fold_limits(SENT_BLOCK=33):
        same(collectives.psum(x, reduction=how).value, whole)
    alone = [collectives.psum(x[:, a : a + 140], reduction=how).value for a in range(0, 700, 140)]
    if order == "ring" and rounding == "nearest":
        sent = np.concatenate(
            [
                np.stack([gpusim.round_to(row[a : a + 140], wire) for row in x])
                for a in range(0, 700, 140)
            ],
            axis=1,
        )
        total = collectives.psum(sent, reduction=Reduction(order="ring")).value
        pieces = [gpusim.round_to(total[a : a + 140], wire) for a in range(0, 700, 140)]
        same(whole, np.concatenate(pieces))
    assert not np.array_equal(np.concatenate(alone), whole) or order == "ring"


@pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize("wire", [Wire("nvfp4"), Wire("fp8", 0.3, at="ends")], ids=str)
def test_devices_have_the_same_bits(wire: Wire) -> None:
    from gpusim.collectives.fold import fold_spec
    from gpusim.cuda import sends
    from gpusim.fallback import run_fold
    from gpusim.fallback.wires import round_to_wire

    device, x = HostDevice(), numbers(6, (5, 2, 70), np.dtype(np.float32))
    levels = Reduction(order="ring", groups_of=2, across=Reduction(wire=wire))
    for how in (Reduction(wire=wire), Reduction(order="tree", wire=wire, seed=1), levels):
        spec = dataclasses.replace(fold_spec(how), divisor=5)
        expected = run_fold(spec, x, batch_ndim=1)
        same(device.run_fold(spec, x, batch_ndim=1), expected)
        same(device.run_fold(spec, list(x), batch_ndim=1), expected)
        out = np.empty_like(expected)
        device.run_fold(spec, x, batch_ndim=1, out=out)
        same(out, expected)
    drawn = dataclasses.replace(wire, rounding="stochastic")
    found = sends.round_to_wire(device, x, drawn.info, seed=2, place=7)
    same(found, round_to_wire(x, drawn.info, seed=2, place=7))


def test_what_travels_is_counted() -> None:
    assert (Wire("nvfp4").bits, Wire("nvfp4").scale_bits, Wire("nvfp4").message_bits) == (4, 8, 32)
    given = Wire("fp8", scale=2)
    assert (given.bits, given.scale_bits, given.message_bits) == (8, 0, 0)


TEXTS = {
    "linear wire=nvfp4": Wire("nvfp4"),
    "linear wire=nvfp4:stochastic@ends": Wire("nvfp4", rounding="sr", at="ends"),
    "linear wire=float4_e2m1fn:nvfp4:32": Wire("nvfp4", block=32),
    "linear wire=float8_e4m3fn:0.1": Wire("fp8", scale=0.1),
    "linear wire=float8_e5m2:1e-20@members": Wire("fp8_e5m2", 1e-20, at="members"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_wires_have_texts(text: str) -> None:
    reduction = Reduction(wire=TEXTS[text])
    assert str(reduction) == text and gpusim.as_reduction(text) == reduction
    wire = reduction.wire
    assert eval(repr(wire), {"Wire": Wire}) == wire and hash(wire) == hash(TEXTS[text])


def test_the_tables_of_short_names() -> None:
    assert ALIASES == {
        "bf16": "bfloat16",
        "fp16": "float16",
        "fp32": "float32",
        "fp64": "float64",
        "fp8": "float8_e4m3fn",
        "fp8_e4m3": "float8_e4m3fn",
        "fp8_e5m2": "float8_e5m2",
        "fp4": "float4_e2m1fn",
    }
    assert ROUNDINGS == {"sr": "stochastic", "rne": "nearest"}


@pytest.mark.parametrize("alias", ALIASES)
def test_short_names_are_their_formats(alias: str) -> None:
    name = ALIASES[alias]
    assert format_name(alias) == name
    assert Wire(alias) == Wire(name) and str(Reduction(wire=alias)) == f"linear wire={name}"
    assert gpusim.as_reduction(f"tree wire={alias}") == Reduction(order="tree", wire=name)
    x = np.array([0.3, 1.7])
    same(gpusim.round_to(x, alias), gpusim.round_to(x, NAMED_FORMATS.get(name, name)))
    accumulate = Reduction(accumulate=alias).accumulate
    assert accumulate == NAMED_FORMATS.get(name, name)
    assert gpusim.as_reduction({"accumulate": alias}).accumulate == accumulate
    assert gpusim.as_reduction(f"linear accumulate={alias}").accumulate == accumulate
    if name in ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"):
        assert Wire.mx(alias) == Wire.mx(name)
        assert gpusim.as_reduction(f"ring wire=mx:{alias}").wire == Wire.mx(name)


@pytest.mark.parametrize("alias", ROUNDINGS)
def test_short_names_are_their_roundings(alias: str) -> None:
    name = ROUNDINGS[alias]
    assert Reduction(rounding=alias) == Reduction(rounding=name)
    assert gpusim.as_reduction(f"linear rounding={alias}") == Reduction(rounding=name)
    assert gpusim.as_reduction({"rounding": alias}) == Reduction(rounding=name)
    assert gpusim.as_reduction(f"linear wire=bf16:{alias}").wire == Wire("bf16", rounding=name)
    x = np.linspace(0, 1, 30)
    same(gpusim.round_to(x, "fp8", rounding=alias), gpusim.round_to(x, "fp8", rounding=name))
    same(gpusim.quantise_fpx(x, 4, 3, alias), gpusim.quantise_fpx(x, 4, 3, name))


SEVERAL = "is the name of several formats: expected"
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: Wire("fp6"), f"'fp6' {SEVERAL} 'float6_e2m3fn' or 'float6_e3m2fn'"),
    (lambda: gpusim.round_to(1.0, "float8"), f"'float8' {SEVERAL}"),
    (lambda: Reduction(accumulate="fp8_fnuz"), f"accumulate='fp8_fnuz': 'fp8_fnuz' {SEVERAL}"),
    (lambda: Wire("nvfp4", "amax"), "wire 'nvfp4', scale='amax': expected no scale"),
    (lambda: Wire("nvfp4", block="row"), "wire scale='nvfp4', block='row': expected"),
    (lambda: Wire("int8", "nvfp4", 16), "wire scale='nvfp4': expected the format"),
    (lambda: Wire("fp8", 0), "wire scale=0: expected a number above zero"),
    (lambda: Wire("fp8", -1.0), "wire scale=-1.0: expected a number above zero"),
    (lambda: Wire("fp8", np.nan), "wire scale=nan: expected a number above zero"),
    (lambda: Wire("fp8", 1e39), "wire scale=1e+39: expected a number above zero that float32"),
    (lambda: Wire("fp8", True), "wire scale=True: expected one of"),
    (lambda: Wire("fp8", 1.0, 64), "wire block=64, scale=1.0: expected no block"),
    (lambda: Wire("fp32", 1.0), "expected a format of fewer bits than float32"),
    (lambda: gpusim.as_reduction("linear wire=fp8:nan"), "wire scale='nan': expected one of"),
    (lambda: gpusim.as_reduction("linear wire=fp8:-1"), "wire scale='-1': expected one of"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_has_no_meaning_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)
