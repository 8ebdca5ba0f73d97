"""gpusim.round_to with a Wire: what a replica's value becomes when it is sent."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import gpusim
from gpusim import Wire

WIRES = [
    Wire("bfloat16"),
    Wire("int8", scale="amax", block=5),
    Wire("int4", scale="amax", block="row", rounding="stochastic"),
    Wire.mx("float4_e2m1fn", "even"),
]


@pytest.mark.parametrize("wire", WIRES, ids=repr)
def test_a_wire_is_that_of_members_that_are_sent(wire: Wire) -> None:
    """round_to in each replica, and a sum of them, is a sum whose members are rounded."""
    x = np.random.default_rng(0).standard_normal((7, 3, 11)).astype(np.float32)
    sent = gpusim.vmap(lambda x: gpusim.round_to(x, wire, seed=3), axis_name="i")(x)
    for name, map_ in (("pmap", gpusim.pmap), ("vmap", gpusim.vmap)):
        again = map_(lambda x: gpusim.round_to(x, wire, seed=3), axis_name="i")(x)
        assert np.array_equal(again, sent), name
    if wire.rounding == "nearest":
        assert np.array_equal(sent[2], gpusim.round_to(x[2], wire))
        at_members = gpusim.Reduction(order="tree", wire=replace(wire, at="members"))
        total = gpusim.collectives.psum(x, reduction=at_members).value
        tree = gpusim.Reduction(order="tree")
        assert np.array_equal(total, gpusim.collectives.psum(sent, reduction=tree).value)


def test_what_a_wire_loses_comes_with_later_values() -> None:
    """Error feedback: the sum of what was sent differs by the last residual only."""
    wire, rng = Wire("int4", scale="amax", block=8), np.random.default_rng(1)
    residual, given, arrived = np.zeros(40), np.zeros(40), np.zeros(40)
    for _ in range(50):
        gradient = rng.standard_normal(40)
        sent = gpusim.round_to(gradient + residual, wire)
        residual += gradient - sent
        given += gradient
        arrived += sent
    assert np.allclose(given - arrived, residual, atol=1e-12)
    assert np.abs(residual).max() < 0.5


def test_a_wire_is_refused_where_it_has_no_meaning() -> None:
    with pytest.raises(ValueError, match="rounding='stochastic': expected the rounding of Wire"):
        gpusim.round_to(1.0, Wire("bfloat16"), rounding="stochastic")
    with pytest.raises(TypeError, match="expected a floating-point dtype"):
        gpusim.round_to(np.arange(3), Wire("bfloat16"))


def test_what_is_refused_is_not_among_what_is_expected() -> None:
    known = "float16, bfloat16, float8_e5m2, float8_e4m3fn, float8_e5m2fnuz, float8_e4m3fnuz, "
    known = f"expected a floating-point dtype ({known}float32, float64)"
    for said, refused in (
        (f"wire: float8_e4m3 given, {known}, a Format, or one of", lambda: Wire("float8_e4m3")),
        (f"wire: int16 given, {known}, a Format", lambda: Wire("int16")),
        (
            f"dtype: float8_e4m3 given, {known}, or a Format",
            lambda: gpusim.round_to(np.ones(2), "float8_e4m3"),
        ),
        (f"x: int8 given, {known}", lambda: gpusim.round_to(np.ones(2, "int8"), "float16")),
    ):
        with pytest.raises(TypeError, match=re.escape(said)):
            refused()
