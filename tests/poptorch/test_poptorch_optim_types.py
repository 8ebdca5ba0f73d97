"""Types, rounding and loss scaling of PopTorch's optimizers: each weight is rounded once."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpusim import fallback, poptorch
from gpusim.poptorch import optim
from gpusim.poptorch.enums import MeanReductionStrategy
from gpusim.poptorch.optim.gradients import adjust_loss_scaling
from gpusim.poptorch.optim.rule import FIRST_STEP
from gpusim.poptorch.optim.updater import updater_for
from tests.poptorch.optimized import (
    HALF,
    Make,
    Trained,
    assert_equal,
    assert_groups_are_models,
    automatic_options,
    gradients,
    model,
    stacked,
    stochastic_options,
)

# ---------------------------------------------------------------- types


def half(value: Tensor) -> Tensor:
    return value.half().float()


def test_float16_weights_are_computed_in_float32_and_rounded_once() -> None:
    found = Trained(lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1), dtype=HALF)
    for _ in range(3):
        before = {name: weight.float() for name, weight in found.weights.items()}
        expected = {}
        for name, gradient in gradients(found.steps).items():
            decayed = torch.add(half(gradient)[None], before[name], alpha=0.1)
            expected[name] = torch.add(before[name], decayed, alpha=-0.1).half()
        assert_equal(found.step().weights, expected)


@pytest.mark.parametrize("types", [(HALF, HALF), (HALF, torch.float32), (torch.float32, HALF)])
def test_adams_moments_are_kept_in_their_types_and_used_as_kept(
    types: tuple[torch.dtype, torch.dtype],
) -> None:
    first, second = types
    trained = Trained(
        lambda p: optim.Adam(
            p,
            lr=0.1,
            first_order_momentum_accum_type=first,
            second_order_momentum_accum_type=second,
        ),
        dtype=HALF,
    )
    name = "lin.weight"
    m, v = torch.zeros(1, 5, 7), torch.zeros(1, 5, 7)
    for step in range(1, 4):
        g, w = half(gradients(step - 1)[name])[None], trained.weights[name].float()
        m = torch.lerp(m, g, 1 - 0.9).to(first).float()
        v = (v * 0.999).addcmul(g, g, value=1 - 0.999).to(second).float()
        root = v.sqrt() / math.sqrt(1 - 0.999**step) + 1e-8
        w = w.addcdiv(m, root, value=-0.1 / (1 - 0.9**step)).half()
        trained.step()
        slots = trained.state.slots[name]
        assert (slots["Accl1"].dtype, slots["Accl2"].dtype) == types
        torch.testing.assert_close(slots["Accl1"].float(), m, rtol=0, atol=0)
        torch.testing.assert_close(slots["Accl2"].float(), v, rtol=0, atol=0)
        torch.testing.assert_close(trained.weights[name], w, rtol=0, atol=0)


def test_the_separate_velocity_is_kept_in_its_type_times_the_loss_scaling() -> None:
    trained = Trained(
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, loss_scaling=256.0, velocity_accum_type=HALF)
    )
    velocity = torch.zeros(5)
    for step in range(3):
        before = trained.weights["lin.bias"][0].clone()
        velocity = (velocity * 0.9).add(gradients(step)["lin.bias"], alpha=256).half().float()
        trained.step()
        kept = trained.state.slots["lin.bias"]["Accl1"]
        assert kept.dtype == HALF
        assert torch.equal(kept[0].float(), velocity)
        expected = before.add(velocity, alpha=-0.1 / 256)
        assert torch.equal(trained.weights["lin.bias"][0], expected)


def test_a_combined_accumulator_has_the_weights_type_and_starts_with_their_decay() -> None:
    trained = Trained(
        lambda p: optim.SGD(
            p, lr=0.1, momentum=0.9, weight_decay=0.25, use_combined_accum=True, accum_type=HALF
        ),
        dtype=torch.bfloat16,
    )
    kept = trained.state.slots["lin.bias"]["Accl"]
    assert torch.equal(kept, (trained.weights["lin.bias"].float() * 0.25).bfloat16())


STRATEGIES = [
    (lambda p: optim.Adam(p), MeanReductionStrategy.Post),
    (lambda p: optim.Adam(p, accum_type=HALF), MeanReductionStrategy.Running),
    (lambda p: optim.SGD(p, lr=1.0, accum_type=HALF), MeanReductionStrategy.Running),
    (
        lambda p: optim.SGD(p, lr=1.0, accum_type=HALF, use_combined_accum=True),
        MeanReductionStrategy.Post,
    ),
    (lambda p: torch.optim.SGD(p, lr=1.0), MeanReductionStrategy.Post),
]


@pytest.mark.parametrize(("make", "strategy"), STRATEGIES)
def test_accumulating_in_float16_makes_the_strategy_running(
    make: Make, strategy: MeanReductionStrategy
) -> None:
    options = poptorch.Options()
    options._freeze()
    assert Trained(make, options=options).updater.strategy == strategy
    assert options.Training.meanAccumulationAndReplicationReductionStrategy == strategy
    with pytest.raises(AttributeError, match="frozen"):
        options.deviceIterations(2)


def test_gradients_accumulate_in_the_type_that_the_optimizer_says() -> None:
    def found(make: Make, micro_batches: int, dtype: torch.dtype) -> torch.dtype:
        options = poptorch.Options()
        options.Training.gradientAccumulation(micro_batches)
        updater = updater_for(make(model().values()), options, model())
        return updater.accumulate_dtype("lin.weight", dtype)

    assert found(optim.Adam, 4, HALF) == torch.float32
    assert found(lambda p: optim.Adam(p, accum_type=HALF), 4, torch.float32) == HALF
    assert found(lambda p: torch.optim.SGD(p, lr=1.0), 4, HALF) == torch.float32
    # without accumulation there is no accumulator
    assert found(lambda p: optim.Adam(p, accum_type=HALF), 1, torch.float32) == torch.float32


def test_combined_accumulators_have_the_gradients_type() -> None:
    options = poptorch.Options()
    options.Training.gradientAccumulation(4)
    parameters = model()
    optimizer = optim.SGD(parameters.values(), lr=1.0, momentum=0.9, use_combined_accum=True)
    updater = updater_for(optimizer, options, parameters)
    assert updater.accumulate_dtype("lin.weight", HALF) == HALF


# ---------------------------------------------------------------- stochastic rounding


def test_stochastic_rounding_of_weights_has_the_contracts_bits() -> None:
    trained = Trained(
        lambda p: optim.SGD(p, lr=0.1), options=stochastic_options(), dtype=HALF, seed=7
    )
    for update in (1, 2):
        before = {name: weight.float() for name, weight in trained.weights.items()}
        expected = {}
        for place, (name, gradient) in enumerate(gradients(update - 1).items()):
            exact = torch.add(before[name], half(gradient)[None], alpha=-0.1)[0]
            rounded = fallback.round_to(
                exact.numpy(),
                np.float16,
                rounding="stochastic",
                seed=7,
                step=FIRST_STEP,
                call=update,
                place=place,
            )
            expected[name] = torch.from_numpy(rounded)[None]
        assert_equal(trained.step().weights, expected)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_stochastic_rounding_is_right_on_average(dtype: torch.dtype) -> None:
    # steps of an eighth of a last bit: rounded to nearest, weights of 1 would never move
    parameter = {"w": torch.nn.Parameter(torch.ones(20000))}
    weights = {"w": torch.ones(1, 20000, dtype=dtype)}
    options = stochastic_options().randomSeed(3)
    updater = updater_for(optim.SGD(parameter.values(), lr=1.0), options, parameter)
    updater.init(weights)
    step = torch.finfo(dtype).eps / 8
    for _ in range(8):
        updater.apply(weights, {"w": torch.full((1, 20000), -step)})
    moved = weights["w"].double() - 1
    error = float(moved.mean()) / (8 * step) - 1
    assert abs(error) < 5 * 0.02  # the spread of 160,000 throws at 1 : 7, five times
    assert moved.unique().numel() > 2


def test_stochastic_rounding_is_for_moments_too_and_off_by_default() -> None:
    def make(parameters: Iterable[Any]) -> Any:
        return optim.Adam(parameters, lr=0.1, first_order_momentum_accum_type=HALF)

    nearest, stochastic = Trained(make).step(2), Trained(make, options=stochastic_options()).step(2)
    again = Trained(make, options=stochastic_options()).step(2)
    other = Trained(make, options=stochastic_options(), seed=1).step(2)
    first = [trained.state.slots["lin.weight"]["Accl1"] for trained in (nearest, stochastic, other)]
    assert not any(torch.equal(first[a], first[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    assert_equal(again.weights, stochastic.weights)
    second = stochastic.state.slots["lin.weight"]["Accl2"]
    assert torch.equal(nearest.state.slots["lin.weight"]["Accl2"], second)


def test_groups_of_replicas_round_as_models_by_themselves() -> None:
    assert_groups_are_models(
        lambda p: optim.AdamW(p, lr=0.1, second_order_momentum_accum_type=HALF),
        options=stochastic_options(),
        dtype=HALF,
    )


# ---------------------------------------------------------------- automatic loss scaling


def test_automatic_loss_scaling_doubles_while_gradients_fit_and_halves_when_they_do_not() -> None:
    parameter = {"w": torch.nn.Parameter(torch.zeros(4))}
    weights = {"w": torch.zeros(1, 4, dtype=HALF)}
    optimizer = optim.SGD(parameter.values(), lr=0.0, loss_scaling=4.0)
    updater = updater_for(optimizer, automatic_options(), parameter)
    updater.init(weights)
    scales = []
    for _ in range(7):
        scales.append(updater.loss_scale)
        gradient = torch.full((1, 4), 200.0) * updater.loss_scale
        updater.apply(weights, {"w": gradient.half()})
    # 200 x 32 is beyond a sixteenth of 65504, 200 x 16 is not
    assert scales == [4, 8, 16, 32, 16, 32, 16]


def test_automatic_loss_scaling_ends_at_what_float16_holds() -> None:
    trained = Trained(lambda p: optim.Adam(p, loss_scaling=64.0), options=automatic_options())
    assert trained.step(20).updater.loss_scale == 2**15


def test_weights_are_those_without_automatic_loss_scaling() -> None:
    for make in (lambda p: torch.optim.Adam(p, lr=0.1), lambda p: optim.LAMB(p, lr=0.1)):
        found = Trained(make, options=automatic_options()).step(5)
        assert found.updater.loss_scale == 32
        assert_equal(found.weights, Trained(make).step(5).weights)


def test_velocities_do_not_follow_the_automatic_factor() -> None:
    def make(parameters: Iterable[Any]) -> Any:
        return optim.SGD(parameters, lr=0.1, momentum=0.9, loss_scaling=2.0)

    found = Trained(make, options=automatic_options()).step(5)
    assert_equal(found.weights, Trained(make).step(5).weights)


def test_an_update_whose_gradients_overflowed_is_left_out() -> None:
    trained = Trained(lambda p: optim.Adam(p, lr=0.1), options=automatic_options()).step(3)
    before, scale = copy.deepcopy(trained.weights), trained.updater.loss_scale
    bad = stacked([gradients(9)])
    bad["lin.bias"][0, 2] = math.inf
    trained.updater.apply(trained.weights, bad, trained.state)
    assert_equal(trained.weights, before)
    assert trained.updater.loss_scale == scale / 2
    assert trained.state.steps["lin.bias"] == 3


def test_nan_counts_as_too_large() -> None:
    values = [torch.tensor([1.0, math.nan], dtype=HALF)]
    assert adjust_loss_scaling(values, 8.0, 1.0) == (4.0, False)
