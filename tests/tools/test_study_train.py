"""The training study shows what is known: small updates vanish, or survive on average."""

from __future__ import annotations

import numpy as np
import pytest

from gpusim.fallback import round_to
from gpusim.formats import kernel_format
from gpusim.study import Training, train
from gpusim.tools import digits
from gpusim.tools.study import training


@pytest.fixture(scope="module")
def trained() -> Training:
    formats = ("bfloat16", "bfloat16:stochastic", "float8_e4m3fn", "float8_e4m3fn:stochastic")
    return train(formats, epochs=12, rate=0.005)


def ways(trained: Training) -> dict[str, float]:
    return {row["format"]: row["progress"] for row in trained.table}


def test_small_updates_vanish_where_they_are_rounded_to_nearest(trained: Training) -> None:
    found = ways(trained)
    assert found["float32"] == 1
    assert found["bfloat16"] < 0.5
    assert found["float8_e4m3fn"] < 0.05


def test_small_updates_survive_stochastic_rounding_on_average(trained: Training) -> None:
    found = ways(trained)
    assert found["bfloat16, stochastic"] == pytest.approx(1, abs=0.03)
    assert found["float8_e4m3fn, stochastic"] == pytest.approx(1, abs=0.2)
    losses = {row["format"]: row["final loss"] for row in trained.table}
    assert losses["bfloat16, stochastic"] == pytest.approx(losses["float32"], abs=0.01)
    assert losses["bfloat16"] > losses["float32"] + 0.01


def test_weights_are_representable_in_their_format(trained: Training) -> None:
    for run in trained.runs:
        for weights in run.weights:
            held = round_to(weights, kernel_format(run.format.dtype)).astype(np.float32)
            assert np.array_equal(held, weights)


def test_float32_is_plain_gradient_descent(trained: Training) -> None:
    data = digits.load(8, 0)
    weights = digits.initial(0)
    for images, labels in data.deal(12):
        _, gradients = digits.loss_and_gradients(
            weights, images.reshape(-1, digits.PIXELS), labels.reshape(-1, digits.CLASSES)
        )
        for name in weights:
            weights[name] = weights[name] - 0.005 * gradients[name]
    flat = np.concatenate([w.reshape(-1) for w in weights.values()])
    np.testing.assert_allclose(trained.runs[0].weights[-1], flat, rtol=1e-3, atol=1e-5)


def test_the_same_seed_gives_the_same_bits() -> None:
    runs = [train(["float16:stochastic"], epochs=2, seed=seed).runs[1] for seed in (4, 4, 5)]
    assert runs[0].weights[-1].tobytes() == runs[1].weights[-1].tobytes()
    assert runs[0].weights[-1].tobytes() != runs[2].weights[-1].tobytes()


def test_only_what_is_named_is_in_the_format() -> None:
    held = train(["float8_e5m2"], gradients=False, epochs=1).runs[1]
    sent = train(["float8_e5m2"], weights=False, epochs=1).runs[1]
    assert len(np.unique(held.weights[-1])) < 256 < len(np.unique(sent.weights[-1]))
    both = train(["float8_e5m2"], epochs=1).runs[1]
    assert not np.array_equal(both.weights[-1], sent.weights[-1])
    with pytest.raises(ValueError, match="neither weights nor gradients"):
        train(weights=False, gradients=False)


def test_gradients_use_the_formats_range_and_do_not_overflow() -> None:
    for dtype, most in (
        (np.dtype(np.float16), 65504.0),
        (training.parse("float8_e4m3fn").dtype, 448),
    ):
        for size in (1e-7, 0.3, 5e3):
            stacked = np.full((8, 3), size, np.float32)
            total = 8 * size * training._scale(stacked, dtype)
            assert most / 4 <= total <= most / 2


def test_no_gradient_needs_no_scale() -> None:
    assert training._scale(np.zeros((4, 2)), np.dtype(np.float16)) == 1


def test_any_small_format_trains() -> None:
    """e5m10 is float16; sums of gradients in formats without a dtype stay in the format."""
    native, general = (
        train([f"{name}:stochastic"], gradients=False, epochs=1).runs[1]
        for name in ("float16", "e5m10")
    )
    assert np.array_equal(native.weights[-1], general.weights[-1])
    coarse = train("e4m2,e4m2:stochastic", weights=False, epochs=1)
    assert [row["format"] for row in coarse.table] == ["float32", "e4m2", "e4m2, stochastic"]
    for run in coarse.runs[1:]:
        assert not np.array_equal(run.weights[-1], coarse.runs[0].weights[-1])
    with pytest.raises(ValueError, match="expected float32 or narrower"):
        train("e11m40")
