"""Error feedback in studies: against the recipe in docs/numerics.md, in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpusim
from gpusim import Wire, collectives
from gpusim.fallback.orders import ring_bounds
from gpusim.study import sweep
from gpusim.tools.study.feedback import Residuals
from gpusim.tools.study.settings import Setting
from gpusim.tools.study.synthetic import Synthetic

WIRES = ["int4:amax:16@members", "int8:amax@ends", "bfloat16@ends", "nvfp4@members"]
WIRES += ["mx:float8_e4m3fn@ends", "float8_e4m3fn:0.25@members"]


def values(replicas: int, elements: int) -> np.ndarray:
    return np.random.default_rng(4).standard_normal((replicas, elements)).astype(np.float32)


def recipe(
    steps: list[np.ndarray], order: str, wire: Wire, feedback: bool, bounds: list[int]
) -> list[Fraction]:
    """The accumulated sums, by gpusim.round_to of each message as a user's program has it."""
    replicas, elements = steps[0].shape
    residuals = np.zeros((replicas, elements), np.float32)
    totals = [Fraction(0)] * elements
    for gradients in steps:
        wanted = gradients + residuals
        sent = np.empty_like(wanted)
        for a, b in pairwise(bounds):
            for replica in range(replicas):
                sent[replica, a:b] = gpusim.round_to(wanted[replica, a:b], wire)
        if feedback:
            residuals = wanted - sent
        after = (
            Wire(wire.format, wire.scale, wire.block, at="result") if wire.at == "ends" else None
        )
        rest = gpusim.Reduction(order=order, accumulate="float32", wire=after)
        result = collectives.psum(sent, reduction=rest).value
        totals = [t + Fraction(r) for t, r in zip(totals, result.tolist(), strict=True)]
    return totals


def relative_error(totals: list[Fraction], steps: list[np.ndarray]) -> float:
    columns = np.concatenate(steps).astype(np.float64).T.tolist()
    exact = [sum(map(Fraction, column)) for column in columns]
    errors = sum((t - e) ** 2 for t, e in zip(totals, exact, strict=True))
    return float(errors / sum(Fraction(e) ** 2 for e in exact)) ** 0.5


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("order", ["tree", "linear", "ring", "kahan"])
@pytest.mark.filterwarnings("ignore::gpusim.study.ArtefactWarning")
def test_residuals_are_those_of_the_recipe(order: str, wire: str) -> None:
    x = values(5, 67)
    bounds = ring_bounds(67, 5) if order == "ring" else [0, 67]
    found = sweep(
        x,
        replicas=5,
        dtypes="float32",
        orders=order,
        wires=["none", wire],
        roundings="nearest",
        error_feedback=3,
    )
    assert [row.setting.feedback for row in found.rows] == [False, False, True]
    for row in found.rows[1:]:
        given = row.setting.wire
        assert given is not None
        totals = recipe([x] * 3, order, given, row.setting.feedback, bounds)
        expected = relative_error(totals, [x] * 3)
        assert row.mean.relative_error == pytest.approx(expected, rel=1e-9)
    assert found.rows[2].mean.relative_error < found.rows[1].mean.relative_error
    assert found.about["notes"] == ["the values are the same at each of the 3 steps"]


def test_distributions_have_other_values_at_each_step() -> None:
    found = sweep(
        "normal",
        replicas=4,
        elements=50,
        dtypes="float32",
        orders="tree",
        wires="int4:amax@members",
        roundings="nearest",
        error_feedback=5,
        input_seed=7,
    )
    source = Synthetic("normal", 50, 7)
    steps = [source.at_step(step).block(4, range(4), 0, 50).astype(np.float32) for step in range(5)]
    assert np.array_equal(steps[0], source.block(4, range(4), 0, 50).astype(np.float32))
    assert len({step.tobytes() for step in steps}) == 5
    for row in found.rows:
        assert row.setting.wire is not None
        totals = recipe(steps, "tree", row.setting.wire, row.setting.feedback, [0, 50])
        expected = relative_error(totals, steps)
        assert row.mean.relative_error == pytest.approx(expected, rel=1e-9)
    assert found.about["notes"] == []


@pytest.mark.parametrize("order", ["tree", "ring", "linear"])
@pytest.mark.parametrize("wire", ["int8:amax:8@ends", "bfloat16@members", "nvfp4@ends"])
@pytest.mark.parametrize("groups", ["none", "3", "2:tree"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_first_step_sends_the_bits_of_the_wire_itself(
    order: str, wire: str, groups: str, rounding: str
) -> None:
    """Residuals change nothing before there are any: in levels, with a lone member, and drawn."""
    x = values(7, 45)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        how: dict[str, Any] = {"dtypes": "float32", "orders": order, "roundings": rounding}
        found = sweep(
            x, replicas=7, wires=wire, hierarchies=groups, error_feedback=2, seeds=5, **how
        )
    plain, fed = found.settings
    assert (plain.feedback, fed.feedback) == (False, True)
    residuals = Residuals(fed, 5)
    sent = residuals.send(x, 0)
    whole = collectives.psum(x, reduction=plain.reduction(5), call=0).value
    parts = collectives.psum(sent, reduction=residuals.rest, call=0).value
    assert whole.tobytes() == parts.tobytes()
    kept = residuals.kept
    assert kept is not None and np.array_equal(kept, x - sent)
    if groups == "3":  # the seventh replica is a group of its own, and sends nothing
        assert not kept[6].any() and kept[:6].any()


def test_what_a_residual_keeps_is_never_lost() -> None:
    """The sums of what was sent and of what is kept are the values, to the last bit."""
    x = np.round(values(3, 20) * 64).astype(np.float32)  # whole numbers: float32 adds them exactly
    setting = Setting(
        np.dtype(np.float32),
        np.dtype(np.float32),
        "tree",
        "nearest",
        "sum",
        Wire("bfloat16", at="members"),
        None,
        None,
        4,
        True,
    )
    residuals = Residuals(setting, 0)
    total = np.zeros_like(x)
    for step in range(1, 9):
        total += residuals.send(x * 3, 2 * step)
        assert residuals.kept is not None
        assert np.array_equal(total + residuals.kept, 3 * step * x)


def test_a_sweep_with_feedback_is_stored_repeated_and_drawn(tmp_path: Path) -> None:
    how: dict[str, Any] = {
        "replicas": [2, 5],
        "elements": 40,
        "dtypes": "bfloat16,e5m6",
        "orders": "tree",
        "wires": "int8:amax@members",
        "ops": "sum,mean",
        "error_feedback": 3,
        "seeds": [0, 1],
    }
    found = sweep("lognormal", store=tmp_path / "s", **how)
    again = sweep("lognormal", store=tmp_path / "s", resume=True, threads=1, **how)
    assert again.rows == found.rows
    assert sweep("lognormal", threads=3, **how).rows == found.rows
    assert "--error-feedback 3" in found.about["command"]
    names = [setting.name for setting in found.settings]
    assert len(set(names)) == len(names) == 16
    assert names[1].endswith("wire int8:amax@members, 3 steps with error feedback")
    records = [row.record for row in found.rows]
    assert {(record["steps"], record["feedback"]) for record in records} == {(3, False), (3, True)}
    assert found.plot(tmp_path / "a.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"error_feedback": 1, "wires": "int8@ends"}, "error_feedback=1: expected a number of s"),
        ({"error_feedback": True, "wires": "int8@ends"}, "error_feedback=True: expected a number"),
        ({"error_feedback": 4}, "error_feedback=4: expected a wire at 'ends' or 'members'"),
        ({"error_feedback": 4, "wires": "bfloat16"}, "expected a wire at 'ends' or 'members'"),
        ({"error_feedback": 4, "wires": "bfloat16@result"}, "expected a wire at 'ends' or"),
    ],
)
def test_feedback_needs_messages_of_the_replicas_own(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sweep("normal", elements=8, replicas=2, orders="tree", roundings="nearest", **options)
