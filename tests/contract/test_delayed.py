"""Delayed scaling: its scales in exact arithmetic, in every map, and as wires of a given scale."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpusim
from gpusim import DelayedScaling, Reduction, lax
from tests.cuda.host_cuda.values import same
from tests.oracles.reference_fold import FLOATS, Number, round_number

LARGEST = {"float8_e4m3fn": 448, "float8_e5m2": 57344, "int8": 127}


def to_float32(value: Fraction) -> Fraction | None:
    rounded = round_number(Number(False, value), FLOATS["float32"], None).magnitude
    return rounded if isinstance(rounded, Fraction) else None


def scales(values: list[float], fmt: str, history: int, algorithm: str, margin: int) -> list[float]:
    """The scale of each value and of the one behind them, by the definition of the class."""
    found, kept = [Fraction(1)], []
    for value in values:
        kept = [value, *kept][:history]
        amax = max(kept) if algorithm == "max" and not np.isnan(kept).any() else kept[0]
        scale = None
        if algorithm == "max" and np.isnan(kept).any():
            amax = float("nan")
        if 0 < amax < float("inf"):
            scale = to_float32(Fraction(amax) / LARGEST[fmt])
            scale = None if scale is None else to_float32(scale * Fraction(2) ** margin)
        found.append(found[-1] if scale is None else max(scale, Fraction(2) ** -149))
    return [float(each) for each in found]


@pytest.mark.parametrize("fmt", LARGEST)
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 3, -64, 64])
def test_scales_are_those_of_exact_arithmetic(fmt: str, algorithm: str, margin: int) -> None:
    random = np.random.default_rng(0)
    special = [0.0, np.inf, np.nan, 2.0**-149, 3e38]
    values = np.ldexp(random.random(60), random.integers(-30, 30, 60)).astype(np.float32)
    values[random.permutation(60)[:10]] = special * 2
    for history in (1, 2, 5, 100):
        scaling = DelayedScaling(fmt, history, algorithm, margin)
        expected = scales(values.tolist(), fmt, history, algorithm, margin)
        state, found = scaling.start(), []
        for value in values:
            found.append(float(state.scale))
            x = np.array([value / 2, -value, 0], np.float32)
            before = state
            state = scaling.next(state, x)
            assert state is not before and float(before.scale) == found[-1]
        assert [*found, float(state.scale)] == expected
        assert state.amaxes.shape == (history,) and state.amaxes.dtype == np.float32


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_value_is_rounded_as_by_the_wire(dtype: str, rounding: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = (np.random.default_rng(1).normal(size=(3, 20)) * 30).astype(kind)
    x[0, :3] = np.inf, np.nan, -0.0
    for fmt in ("fp8", "fp8_e5m2", "int8", gpusim.Format(4, 2), gpusim.Format(9, 8)):
        scaling = DelayedScaling(fmt, rounding=rounding)
        state = scaling.next(scaling.start(), x[1])
        wire = scaling.wire(state)
        same(scaling.round(state, x, seed=3), gpusim.round_to(x, wire, seed=3))
        assert wire.rounding == rounding and wire.scale == float(state.scale)


@pytest.mark.parametrize("map_", [gpusim.vmap, gpusim.pmap])
def test_replicas_have_states_of_their_own(map_: Callable[..., Any]) -> None:
    x = np.random.default_rng(2).normal(size=(4, 3, 8)).astype(np.float32)
    scaling = DelayedScaling("fp8", history=2)

    def program(x: Any) -> Any:
        state, sent = scaling.start(), []
        for turn in range(3):
            sent.append(scaling.round(state, x[turn]))
            state = scaling.next(state, x[turn])
        return sent, state

    sent, state = map_(program, axis_name="i")(x)
    for replica in range(4):
        expected, own = program(x[replica])
        for turn in range(3):
            same(np.asarray(sent[turn][replica]), expected[turn])
        same(np.asarray(state.amaxes[replica]), own.amaxes)
        same(np.asarray(state.scale[replica]), np.asarray(own.scale))


@pytest.mark.parametrize("map_", [gpusim.vmap, gpusim.pmap])
def test_replicas_that_have_a_scale_in_common_send_by_a_wire(map_: Callable[..., Any]) -> None:
    x = np.random.default_rng(3).normal(size=(4, 2, 50)).astype(np.float32)
    scaling = DelayedScaling("fp8_e5m2", at="ends", margin=1)

    def program(x: Any) -> Any:
        state = scaling.next(scaling.start(), x[0], axis_name="i")
        total = lax.psum(x[1], "i", reduction=Reduction(order="ring", wire=scaling.wire(state)))
        return total, state.scale

    totals, scale = map_(program, axis_name="i")(x)
    state = scaling.next(scaling.start(), x[:, 0])
    wire = Reduction(order="ring", wire=scaling.wire(state))
    same(np.asarray(scale), np.full(4, state.scale))
    same(np.asarray(totals[0]), gpusim.collectives.psum(x[:, 1], reduction=wire).value)


def test_a_wire_of_several_scales_is_refused() -> None:
    scaling = DelayedScaling()

    def program(x: Any) -> Any:
        return scaling.wire(scaling.next(scaling.start(), x)).bits

    with pytest.raises(TypeError, match=r"pass axis_name= to DelayedScaling\.next"):
        gpusim.vmap(program)(np.ones((2, 3)))


def test_tensors_and_empty_values_have_magnitudes() -> None:
    torch = pytest.importorskip("torch")
    scaling = DelayedScaling(history=1)
    tensor = torch.tensor([1.0, -3.5], dtype=torch.bfloat16, requires_grad=True)
    assert scaling.next(scaling.start(), tensor).amaxes == [3.5]
    for empty in (torch.zeros(0), np.zeros((0, 3)), []):
        state = scaling.next(scaling.start(), empty)
        assert float(state.scale) == 1 and state.amaxes == [0]
    assert float(scaling.next(scaling.start(), 448.0).scale) == 1


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"history": 0}, ValueError, "history=0: expected an integer from 1"),
    ({"history": 1.5}, TypeError, "history=1.5: expected an integer"),
    ({"margin": 65}, ValueError, "margin=65: expected an integer from -64 to 64"),
    ({"algorithm": "mean"}, ValueError, "algorithm='mean': expected 'max' or 'most_recent'"),
    ({"format": "fp32"}, ValueError, "expected a format of fewer bits than float32"),
    ({"rounding": "up"}, ValueError, "rounding='up'"),
    ({"at": "hop"}, ValueError, "wire at='hop': expected one of"),
]


@pytest.mark.parametrize(("fields", "error", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_other_fields_are_refused(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        DelayedScaling(**fields)


def test_settings_compare_and_travel() -> None:
    import pickle

    scaling = DelayedScaling("fp8", history=4, rounding="sr")
    assert scaling == DelayedScaling("float8_e4m3fn", 4, rounding="stochastic")
    assert pickle.loads(pickle.dumps(scaling)) == scaling and hash(scaling) == hash(scaling)
    state = gpusim.tree.map(lambda leaf: leaf + 0, scaling.start())
    same(scaling.next(state, np.ones(3, np.float32)).amaxes, np.array([1, 0, 0, 0], np.float32))
