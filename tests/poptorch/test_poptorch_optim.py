"""PopTorch's optimizers make the weights of torch.optim's, and of their formulas."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpusim import poptorch
from gpusim.poptorch import optim
from gpusim.poptorch.optim import updater
from gpusim.poptorch.optim.gradients import clip
from gpusim.poptorch.optim.rule import Row, blocks
from gpusim.poptorch.optim.updater import updater_for
from tests.poptorch.optimized import (
    CLOSE,
    HALF,
    Make,
    Trained,
    assert_equal,
    assert_groups_are_models,
    assert_same,
    by_torch,
    gradients,
    model,
)

AS_TORCH = {
    "sgd": (optim.SGD, torch.optim.SGD, {"lr": 0.1}),
    "sgd, decay": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "sgd, momentum": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd, nesterov": (
        optim.SGD,
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "adam": (optim.Adam, torch.optim.Adam, {"lr": 0.1}),
    "adam, decay": (
        optim.Adam,
        torch.optim.Adam,
        {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1},
    ),
    "adamw": (optim.AdamW, torch.optim.AdamW, {"lr": 0.1}),
    "adamw, decay": (optim.AdamW, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3}),
    "rmsprop": (optim.RMSprop, torch.optim.RMSprop, {"lr": 0.1}),
    "rmsprop, momentum": (
        optim.RMSprop,
        torch.optim.RMSprop,
        {"lr": 0.1, "momentum": 0.5, "alpha": 0.9, "weight_decay": 0.1},
    ),
    "rmsprop, centered": (
        optim.RMSprop,
        torch.optim.RMSprop,
        {"lr": 0.1, "centered": True, "momentum": 0.5},
    ),
}


@pytest.mark.parametrize("case", AS_TORCH)
class TestAsTorch:
    def test_popTorchs_optimizer_makes_the_weights_of_torchs(self, case: str) -> None:
        own, torchs, settings = AS_TORCH[case]
        found = Trained(lambda parameters: own(parameters, **settings)).step(6)
        assert_same(found.weights, by_torch(lambda p: torchs(p, **settings), 6), **CLOSE)

    def test_torchs_optimizer_can_be_given_itself(self, case: str) -> None:
        _, torchs, settings = AS_TORCH[case]
        found = Trained(lambda parameters: torchs(parameters, **settings)).step(6)
        assert_same(found.weights, by_torch(lambda p: torchs(p, **settings), 6), **CLOSE)

    def test_a_loss_scaling_that_is_a_power_of_two_changes_no_bit(self, case: str) -> None:
        own, _, settings = AS_TORCH[case]
        plain = Trained(lambda parameters: own(parameters, **settings)).step(4)
        scaled = Trained(lambda p: own(p, loss_scaling=1024.0, **settings)).step(4)
        assert scaled.updater.loss_scale == 1024
        assert_equal(scaled.weights, plain.weights)

    def test_other_loss_scalings_are_divided_out(self, case: str) -> None:
        own, torchs, settings = AS_TORCH[case]
        found = Trained(lambda p: own(p, loss_scaling=300.0, **settings)).step(4)
        assert_same(found.weights, by_torch(lambda p: torchs(p, **settings), 4), **CLOSE)

    def test_groups_of_replicas_are_models_by_themselves(self, case: str) -> None:
        own, _, settings = AS_TORCH[case]
        assert_groups_are_models(lambda parameters: own(parameters, **settings))


# ---------------------------------------------------------------- what torch has not


class Scalar:
    """Optimizers written out, for arrays of float64, as their papers and PopTorch have them."""

    def __init__(self, weight: Any) -> None:
        self.w = np.array(weight, np.float64)
        self.count = 0

    def sgd(
        self, g: Any, lr: float, mm: float = 0, dm: float = 0, wd: float = 0, nesterov: bool = False
    ) -> None:
        if not self.count:
            self.v = np.zeros_like(self.w)
        self.count += 1
        g = g + wd * self.w
        self.v = mm * self.v + (1 - dm) * g
        self.w = self.w - lr * (g + mm * self.v if nesterov else self.v)

    def adam(self, g: Any, b1: float, b2: float, eps: float, correct: bool) -> Any:
        if not self.count:
            self.m, self.v = np.zeros_like(self.w), np.zeros_like(self.w)
        self.count += 1
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        c1, c2 = (1 - b1**self.count, 1 - b2**self.count) if correct else (1, 1)
        return self.m / c1 / (np.sqrt(self.v / c2) + eps)

    def adamw(self, g: Any, lr: float, wd: float) -> None:
        step = self.adam(g, 0.9, 0.999, 1e-8, correct=True)
        self.w = self.w - lr * (step + wd * self.w)

    def lamb(self, g: Any, lr: float, wd: float, most: float, correct: bool) -> None:
        step = self.adam(g, 0.9, 0.999, 1e-8, correct) + wd * self.w
        r1, r2 = min(np.sqrt((self.w**2).sum()), most), np.sqrt((step**2).sum())
        self.w = self.w - lr * (r1 / r2 if r1 and r2 else 1.0) * step

    def tensorflow(
        self, g: Any, lr: float, mm: float, alpha: float, eps: float, centered: bool
    ) -> None:
        if not self.count:
            self.v = np.ones_like(self.w)
            self.m, self.buffer = np.zeros_like(self.w), np.zeros_like(self.w)
        self.count += 1
        self.v = alpha * self.v + (1 - alpha) * g * g
        self.m = alpha * self.m + (1 - alpha) * g
        variance = self.v - self.m**2 if centered else self.v
        self.buffer = mm * self.buffer + lr * g / np.sqrt(variance + eps)
        self.w = self.w - self.buffer


def written_out(step: Callable[[Scalar, Any], None], steps: int) -> dict[str, Tensor]:
    each = {name: Scalar(parameter.detach().numpy()) for name, parameter in model().items()}
    for number in range(steps):
        for name, gradient in gradients(number).items():
            step(each[name], gradient.double().numpy())
    return {name: torch.tensor(scalar.w).float()[None] for name, scalar in each.items()}


WRITTEN_OUT: dict[str, tuple[Make, Callable[[Scalar, Any], None]]] = {
    "dampening, from the first step on": (
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.4, weight_decay=0.1),
        lambda s, g: s.sgd(g, 0.1, 0.9, 0.4, 0.1),
    ),
    "dampening without momentum": (
        lambda p: optim.SGD(p, lr=0.1, dampening=0.4),
        lambda s, g: s.sgd(g, 0.1, 0.0, 0.4),
    ),
    "combined": (
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, use_combined_accum=True),
        lambda s, g: s.sgd(g, 0.1, 0.9, 0.0, 0.1),
    ),
    "combined, scaled": (
        lambda p: optim.SGD(
            p,
            lr=0.1,
            momentum=0.9,
            dampening=0.3,
            weight_decay=0.1,
            use_combined_accum=True,
            velocity_scaling=8.0,
            loss_scaling=16.0,
        ),
        lambda s, g: s.sgd(g, 0.1, 0.9, 0.3, 0.1),
    ),
    "combined, nesterov": (
        lambda p: optim.SGD(
            p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, use_combined_accum=True
        ),
        lambda s, g: s.sgd(g, 0.1, 0.9, 0.0, 0.1, nesterov=True),
    ),
    "combined, no momentum": (
        lambda p: optim.SGD(p, lr=0.1, use_combined_accum=True, weight_decay=0.1),
        lambda s, g: s.sgd(g, 0.1, wd=0.1),
    ),
    "adamw, no bias correction": (
        lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.1, bias_correction=False),
        lambda s, g: s.adamw(g, 0.1, 0.1),
    ),
    "lamb": (
        lambda p: optim.LAMB(p, lr=0.1),
        lambda s, g: s.lamb(g, 0.1, 0.01, 65500, correct=True),
    ),
    "lamb, no bias correction, largest norm": (
        lambda p: optim.LAMB(
            p, lr=0.1, weight_decay=0.2, bias_correction=False, max_weight_norm=1.5
        ),
        lambda s, g: s.lamb(g, 0.1, 0.2, 1.5, correct=False),
    ),
    "tensorflow": (
        lambda p: optim.RMSprop(p, lr=0.1, eps=0.1, use_tf_variant=True),
        lambda s, g: s.tensorflow(g, 0.1, 0.0, 0.99, 0.1, centered=False),
    ),
    "tensorflow, momentum, centered": (
        lambda p: optim.RMSprop(
            p, lr=0.1, alpha=0.9, eps=0.1, momentum=0.6, centered=True, use_tf_variant=True
        ),
        lambda s, g: s.tensorflow(g, 0.1, 0.6, 0.9, 0.1, centered=True),
    ),
}


@pytest.mark.parametrize("case", WRITTEN_OUT)
class TestWrittenOut:
    def test_float32_weights_are_those_of_the_formula(self, case: str) -> None:
        make, step = WRITTEN_OUT[case]
        assert_same(Trained(make).step(5).weights, written_out(step, 5), rtol=1e-5, atol=1e-5)

    def test_groups_of_replicas_are_models_by_themselves(self, case: str) -> None:
        assert_groups_are_models(WRITTEN_OUT[case][0])


@pytest.mark.parametrize("decay", [0.01, 0.3])
def test_adamw_corrects_the_moments_whatever_it_is_told_and_says_so(
    decay: float, caplog: pytest.LogCaptureFixture
) -> None:
    """As PopTorch's executor and the host's `step` do: they differ by 0.02 otherwise."""

    def make(parameters: Iterable[Any]) -> Any:
        return optim.AdamW(parameters, lr=0.01, weight_decay=decay, bias_correction=False)

    trained = Trained(make).step(5)
    assert_same(trained.weights, by_torch(make, 5), **CLOSE)
    assert_same(trained.step(5).weights, by_torch(make, 10), **CLOSE)
    trained.updater.set_optimizer(trained.optimizer)
    [told] = [text for text in caplog.messages if "bias_correction" in text]
    assert told.startswith("AdamW's bias_correction=False has no effect")


def test_a_changed_momentum_reaches_combined_accumulators_one_update_later() -> None:
    def make(momentum: float) -> Make:
        return lambda p: optim.SGD(p, lr=0.1, momentum=momentum, use_combined_accum=True)

    changed, before = Trained(make(0.9)).step(2), Trained(make(0.9)).step(2)
    changed.updater.set_optimizer(make(0.1)(changed.named.values()))
    assert_equal(changed.step().weights, before.step().weights)
    changed.step()
    before.step()
    assert not torch.equal(changed.weights["lin.bias"], before.weights["lin.bias"])


def test_lambs_own_step_makes_the_same_weights() -> None:
    def make(parameters: Iterable[Any]) -> Any:
        return optim.LAMB(parameters, lr=0.1, weight_decay=0.1, max_weight_norm=2.0)

    assert_same(Trained(make).step(4).weights, by_torch(make, 4), **CLOSE)


def test_lambs_ratio_is_one_where_a_norm_is_zero() -> None:
    weight = {"w": torch.nn.Parameter(torch.zeros(3))}
    weights = {"w": torch.zeros(1, 3)}
    updater = updater_for(optim.LAMB(weight.values(), lr=0.5), poptorch.Options(), weight)
    updater.init(weights)
    updater.apply(weights, {"w": torch.tensor([[1.0, -2.0, 0.0]])})
    torch.testing.assert_close(weights["w"], torch.tensor([[-0.5, 0.5, 0.0]]))
    # and where the step has: no gradient ever, no decay
    still = {"w": torch.full((1, 3), 7.0)}
    updater = updater_for(
        optim.LAMB(weight.values(), lr=0.5, weight_decay=0.0), poptorch.Options(), weight
    )
    updater.init(still)
    updater.apply(still, {"w": torch.zeros(1, 3)})
    assert still["w"].tolist() == [[7.0, 7.0, 7.0]]


def test_lambs_norms_are_those_of_each_group() -> None:
    weight = {"w": torch.nn.Parameter(torch.ones(2, 2))}
    weights = {"w": torch.tensor([[3.0, 4.0], [30.0, 40.0]])}
    make = optim.LAMB(weight.values(), lr=1.0, weight_decay=0.0)
    updater = updater_for(make, poptorch.Options(), weight)
    updater.init(weights)
    updater.apply(weights, {"w": torch.ones(2, 2)})
    step = torch.tensor([[5.0], [50.0]]) / math.sqrt(2)
    expected = torch.tensor([[3.0, 4.0], [30.0, 40.0]]) - step
    torch.testing.assert_close(weights["w"], expected)


# ---------------------------------------------------------------- speed


@pytest.mark.parametrize("case", [*AS_TORCH, *WRITTEN_OUT])
def test_bits_do_not_depend_on_the_blocks_that_a_host_works_in(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = WRITTEN_OUT[case][0] if case in WRITTEN_OUT else as_poptorchs(case)
    whole = Trained(make, dtype=HALF).step(3)
    sizes = []

    def small(rows: list[Row]) -> Iterator[list[Row]]:
        for block in blocks(rows, 4):
            sizes.append(sum(row.weight.numel() for row in block))
            yield block

    monkeypatch.setattr(updater, "blocks", small)
    found = Trained(make, dtype=HALF).step(3)
    assert_equal(found.weights, whole.weights)
    if not isinstance(found.optimizer, optim.LAMB):
        assert sizes[:11] == [4] * 8 + [3, 4, 2]  # 35, then 5 and 1 elements


def as_poptorchs(case: str) -> Make:
    own, _, settings = AS_TORCH[case]
    return lambda parameters: own(parameters, **settings)


def test_small_parameters_share_a_block_and_what_is_not_contiguous_is_not_cut() -> None:
    def row(weight: torch.Tensor) -> Row:
        return Row(weight, torch.zeros_like(weight), {}, 0)

    rows = [row(torch.zeros(1, size)) for size in (3, 4, 5, 20, 1)]
    assert [[part.weight.numel() for part in block] for block in blocks(rows, 8)] == [
        [3, 4],
        [5],
        [8],
        [8],
        [4, 1],
    ]
    turned = row(torch.zeros(5, 4).T[None])
    assert list(blocks([turned], 8)) == [[turned]]


# ---------------------------------------------------------------- groups of parameters


def test_groups_of_parameters_have_their_own_values() -> None:
    def make(kind: Any) -> Make:
        def of(parameters: Iterable[Any]) -> Any:
            weight, *others = parameters
            groups = [{"params": [weight], "lr": 0.5}, {"params": others, "weight_decay": 0.2}]
            return kind(groups, lr=0.05)

        return of

    for own, torchs in ((optim.AdamW, torch.optim.AdamW), (optim.SGD, torch.optim.SGD)):
        found = Trained(make(own)).step(4)
        assert_same(found.weights, by_torch(make(torchs), 4), **CLOSE)


def test_parameters_that_the_optimizer_has_not_or_without_gradient_stay() -> None:
    trained = Trained(lambda p: optim.Adam(list(p)[:2], lr=0.1))
    before = copy.deepcopy(trained.weights)
    trained.step()
    assert torch.equal(trained.weights["scale"], before["scale"])
    assert not torch.equal(trained.weights["lin.bias"], before["lin.bias"])
    updated = copy.deepcopy(trained.weights)
    trained.updater.apply(trained.weights, {"lin.bias": torch.ones(1, 5)})
    assert torch.equal(trained.weights["lin.weight"], updated["lin.weight"])
    assert not torch.equal(trained.weights["lin.bias"], updated["lin.bias"])


def test_a_parameter_can_join_and_starts_with_its_first_step() -> None:
    trained = Trained(lambda p: torch.optim.Adam(list(p)[:2], lr=0.1)).step(3)
    scale = trained.named["scale"]
    trained.optimizer.add_param_group({"params": [scale]})
    trained.updater.set_optimizer(trained.optimizer)
    before = trained.weights["scale"].clone()
    trained.step()
    # Adam's first step has the length lr, whatever the gradient
    assert float((trained.weights["scale"] - before).abs()) == pytest.approx(0.1, rel=1e-5)


# ---------------------------------------------------------------- norms of gradients


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_max_grad_norm_is_torchs_clip_grad_norm(kind: str) -> None:
    def clipping(parameters: Iterable[Any]) -> Any:
        parameters = list(parameters)
        optimizer = getattr(torch.optim, kind)(parameters, lr=0.1)

        def clip(*_: Any) -> None:
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)

        optimizer.register_step_pre_hook(clip)
        return optimizer

    make: Make = getattr(optim, kind)
    found = Trained(lambda p: make(p, lr=0.1, max_grad_norm=0.5, loss_scaling=64.0)).step(4)
    assert_same(found.weights, by_torch(clipping, 4), rtol=1e-4, atol=1e-5)


def test_an_executor_says_which_groups_its_replicas_are_in() -> None:
    named = {"a": torch.nn.Parameter(torch.zeros(2, 1)), "b": torch.nn.Parameter(torch.zeros(2, 1))}
    optimizer = optim.SGD(named.values(), lr=1.0, max_grad_norm=1.0)
    groups = {"a": [0, 0, 1, 1], "b": [0, 1, 0, 1]}
    updates = updater_for(optimizer, poptorch.Options(), named)
    weights = {name: torch.zeros(2, 1) for name in named}
    updates.init(weights, groups)
    updates.apply(weights, {"a": torch.tensor([[3.0], [0.0]]), "b": torch.tensor([[0.0], [4.0]])})
    # norms 3, 5, 0 and 4
    torch.testing.assert_close(weights["a"], torch.tensor([[-0.6], [0.0]]))
    torch.testing.assert_close(weights["b"], torch.tensor([[0.0], [-0.8]]))


def test_norms_below_the_largest_change_nothing() -> None:
    plain = Trained(lambda p: optim.SGD(p, lr=0.1)).step(3)
    found = Trained(lambda p: optim.SGD(p, lr=0.1, max_grad_norm=1e6)).step(3)
    assert_equal(found.weights, plain.weights)


def test_clipping_takes_groups_of_replicas_as_models_by_themselves() -> None:
    assert_groups_are_models(lambda p: optim.SGD(p, lr=0.1, max_grad_norm=1.0))


def test_a_shared_parameter_is_clipped_for_the_replica_with_the_largest_norm() -> None:
    shared, own = torch.tensor([[3.0]]), torch.tensor([[4.0], [0.0]])
    found = clip({"shared": shared, "own": own}, 1.0)
    torch.testing.assert_close(found["shared"], torch.tensor([[0.6]]))
    torch.testing.assert_close(found["own"], torch.tensor([[0.8], [0.0]]))


def test_groups_of_different_parameters_may_cross() -> None:
    values = {"a": torch.tensor([[3.0], [0.0]]), "b": torch.tensor([[4.0], [0.0]])}
    crossing = {"a": [0, 0, 1, 1], "b": [0, 1, 0, 1]}
    found = clip(values, 1.0, crossing)  # norms 5, 3, 4 and 0
    torch.testing.assert_close(found["a"], torch.tensor([[0.6], [0.0]]))
    torch.testing.assert_close(found["b"], torch.tensor([[0.8], [0.0]]))
    shared = clip(values | {"c": torch.tensor([[12.0]])}, 1.0, crossing)  # 13 is the largest
    torch.testing.assert_close(shared["c"], torch.tensor([[12.0 / 13]]))
    aligned = clip(values, 1.0)  # norms 5, 5, 0 and 0
    torch.testing.assert_close(aligned["a"], torch.tensor([[0.6], [0.0]]))
