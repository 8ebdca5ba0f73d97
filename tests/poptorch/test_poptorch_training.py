"""Training the digits network on replicas equals a plain PyTorch loop that is written out by hand.

Every layout with every optimizer and every output mode, in lockstep and in threads.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpusim
from gpusim import poptorch
from gpusim.collectives import dispatch
from gpusim.poptorch import Options, OutputMode
from gpusim.poptorch.executor import gradients
from tests.poptorch import poptorch_digits as by_hand
from tests.poptorch.poptorch_digits import BATCH, LAYOUTS, OPTIMIZERS, Layout

SAME = 2e-6  # float32, after a few steps
MODES = [
    (OutputMode.All, None), (OutputMode.Final, None), (OutputMode.Sum, None),
    (OutputMode.EveryN, 1), (OutputMode.EveryN, 3), (OutputMode.Default, None),
]  # fmt: skip


def expected(
    outputs: list[tuple[Tensor, Tensor]], layout: Layout, mode: OutputMode, period: int | None
) -> tuple[Tensor, Tensor]:
    """What a call returns of the outputs of all its micro-batches."""
    shape = layout.iterations, layout.accumulations, layout.replicas
    scores = torch.stack([scores for scores, _ in outputs]).reshape(*shape, BATCH, 10)
    losses = torch.stack([loss for _, loss in outputs]).reshape(shape)
    if mode is OutputMode.EveryN:
        scores, losses = (x[(period or 1) - 1 :: period or 1] for x in (scores, losses))
    elif mode is OutputMode.Sum:
        scores, losses = (x.sum(dim=(0, 1)) for x in (scores, losses))
    elif mode is not OutputMode.All:
        scores, losses = scores[-1, -1], losses[-1, -1]
    losses = losses.reshape(-1)
    return scores.reshape(-1, 10), losses if len(losses) > 1 else losses[0]


FAMILIES = ("SGD", "Adam", "AdamW", "RMSprop", "LAMB")
VARIANTS = [name for name in OPTIMIZERS if name not in FAMILIES]
GRID = [(optimizer, layout) for optimizer in FAMILIES for layout in LAYOUTS]
GRID += [(optimizer, LAYOUTS[place]) for optimizer in VARIANTS for place in (3, 11)]


@pytest.mark.parametrize(("optimizer", "layout"), GRID, ids=str)
def test_training_equals_the_loop_by_hand(optimizer: str, layout: Layout) -> None:
    modes = [(mode, n) for mode, n in MODES if layout.iterations % (n or 1) == 0]
    # so that every layout and every optimizer has every mode
    turn = list(OPTIMIZERS).index(optimizer) + LAYOUTS.index(layout) // 2
    mode, period = modes[turn % len(modes)]
    alone, model, net = by_hand.pair(optimizer, layout, layout.options().outputMode(mode, period))
    for images, digits in by_hand.calls(layout, 2):
        outputs = alone.call(images, digits)
        for found, wanted in zip(
            model(images, digits), expected(outputs, layout, mode, period), strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert by_hand.largest_difference(net, alone.net) < SAME
    model.destroy()


def trained(layout: Layout, optimizer: str, options: Options, count: int = 2) -> nn.Module:
    _, model, net = by_hand.pair(optimizer, layout, options)
    for images, digits in by_hand.calls(layout, count):
        model(images, digits)
    model.destroy()
    return net


def threads(options: Options) -> Options:
    options._Popart.set("gpusim.execution", "threads")
    return options


@pytest.mark.parametrize("layout", [LAYOUTS[3], LAYOUTS[11], LAYOUTS[12]], ids=str)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_lockstep_and_threads_give_the_same_weights(optimizer: str, layout: Layout) -> None:
    lockstep = trained(layout, optimizer, layout.options())
    one_by_one = trained(layout, optimizer, threads(layout.options()))
    assert by_hand.largest_difference(lockstep, one_by_one) < SAME


def test_training_takes_the_loss_down() -> None:
    layout = Layout(4, 2, 5)
    _, model, net = by_hand.pair("Adam", layout, layout.options())
    losses = [model(*given)[1].mean().item() for given in by_hand.calls(layout, 60)]
    assert losses[-1] < 0.4 * losses[0]
    images, digits = by_hand.digits()
    right = (net(images, digits)[0].argmax(dim=1) == digits).float().mean()
    assert right > 0.85
    model.destroy()


# ---------------------------------------------------------------- how gradients are reduced


class Linear(nn.Module):
    """A loss with a gradient that is its input: sum(w * x)."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(weights.clone())

    def forward(self, x: Tensor) -> Tensor:
        return poptorch.identity_loss(self.w * x, reduction="sum")


def step_of(
    x: Tensor, options: Options, optimizer: Any = None, weights: Tensor | None = None
) -> Tensor:
    """The weights after a call on `x`, from zeros and with learning rate 1."""
    model = Linear(torch.zeros(x.shape[-1]) if weights is None else weights)
    chosen = optimizer or (lambda p: torch.optim.SGD(p, lr=1.0))
    executor = poptorch.trainingModel(model, options, chosen(model.parameters()))
    executor(x)
    executor.destroy()
    return model.w.detach()


@pytest.mark.parametrize("strategy", poptorch.MeanReductionStrategy)
@pytest.mark.parametrize(
    ("reduction", "divisor"), [(poptorch.ReductionType.Mean, 12), (poptorch.ReductionType.Sum, 1)]
)
def test_means_divide_by_micro_batches_and_replicas(
    reduction: Any, divisor: int, strategy: poptorch.MeanReductionStrategy
) -> None:
    options = Layout(4, 3, 1).options()
    options.Training.accumulationAndReplicationReductionType(reduction)
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    x = torch.randn(12, 5)
    torch.testing.assert_close(step_of(x, options), -x.sum(dim=0) / divisor)


HALF = torch.float16


def half_options(replicas: int, accumulations: int = 1) -> Options:
    options = Layout(replicas, accumulations, 1).options()
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    return options


@pytest.mark.parametrize(
    "how",
    [
        {}, {"order": "ring"}, {"order": "tree"}, {"accumulate": "float32"},
        {"rounding": "stochastic", "seed": 5},
    ],
    ids=str,
)  # fmt: skip
def test_the_contract_explains_each_bit_of_a_reduced_gradient(how: dict[str, Any]) -> None:
    x = (torch.randn(8, 100, generator=torch.Generator().manual_seed(1)) * 10).to(HALF)
    with gpusim.reduction(**how):
        found = step_of(x, half_options(8), weights=torch.zeros(100, dtype=HALF))
    with gpusim.reduction(**how):
        total = gpusim.collectives.psum(x.numpy()).value
    assert found.dtype == HALF and (found.numpy() == -total).all()


@pytest.mark.parametrize("strategy", poptorch.MeanReductionStrategy)
@pytest.mark.parametrize("order", ["linear", "tree"])
def test_small_gradients_are_folded_as_one_with_the_same_bits(
    strategy: poptorch.MeanReductionStrategy, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bits(small: int) -> tuple[list[bytes], int, int]:
        options = LAYOUTS[11].options()
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
        folds = 0
        run_leaves = dispatch.run_leaves

        def counted(call: Any, leaves: Any, *rest: Any) -> Any:
            nonlocal folds
            folds += len(leaves)
            return run_leaves(call, leaves, *rest)

        monkeypatch.setattr(gradients, "SMALL", small)
        with monkeypatch.context() as patch, gpusim.reduction(order=order) as state:
            patch.setattr(dispatch, "run_leaves", counted)
            net = trained(LAYOUTS[11], "SGD", options)
        return [x.detach().numpy().tobytes() for x in net.parameters()], state.calls, folds

    together, calls, folds = bits(2**30)
    apart, calls_apart, folds_apart = bits(-1)
    assert together == apart
    assert calls == calls_apart == folds_apart
    assert folds_apart == len(together) * folds


def test_ways_to_reduce_differ_and_are_reproducible() -> None:
    x = (torch.randn(8, 100, generator=torch.Generator().manual_seed(1)) * 10).to(HALF)
    ways: list[dict[str, Any]] = [{}, {"order": "ring"}, {"rounding": "stochastic", "seed": 5}]

    def weights(how: dict[str, Any]) -> Tensor:
        with gpusim.reduction(**how):
            return step_of(x, half_options(8), weights=torch.zeros(100, dtype=HALF))

    found = [weights(how) for how in ways]
    assert all(torch.equal(weights(how), before) for how, before in zip(ways, found, strict=True))
    assert not any(torch.equal(found[a], found[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_stochastic_rounding_reduces_stochastically_unless_a_context_says_how() -> None:
    x = torch.full((8, 2000), 1.0, dtype=HALF)
    x[0] = 2048.0  # in float16 2048 + 1 is rounded to 2048

    def mean(seed: int, how: dict[str, Any] | None = None) -> float:
        options = half_options(8).randomSeed(seed)
        options.Precision.enableStochasticRounding(True)
        start = torch.zeros(2000, dtype=HALF)
        if how is None:
            return float(-step_of(x, options, weights=start).double().mean())
        with gpusim.reduction(**how):
            return float(-step_of(x, options, weights=start).double().mean())

    assert abs(mean(1) - 2055) < 0.5 and mean(1) == mean(1) != mean(2)
    assert mean(1, {}) == 2048


def test_means_in_float16_are_running_means() -> None:
    # a sum of eight would be infinite in float16
    x = torch.full((8, 3), 40000.0)
    options = Layout(1, 8, 1).options()
    found = step_of(x, options, lambda p: poptorch.optim.SGD(p, lr=1.0, accum_type=torch.float16))
    assert torch.equal(found, torch.full((3,), -40000.0))


def test_the_loss_scaling_is_in_the_gradients_and_not_in_the_weights() -> None:
    options = Layout(2, 2, 1).options().anchorTensor("g", "Gradient___w", OutputMode.All)
    model = Linear(torch.zeros(3))
    sgd = poptorch.optim.SGD(model.parameters(), lr=1.0, loss_scaling=16.0)
    executor = poptorch.trainingModel(model, options, sgd)
    x = torch.randn(4, 3)
    executor(x)
    torch.testing.assert_close(executor.getAnchoredTensor("g").reshape(4, 3), 16 * x)
    torch.testing.assert_close(model.w.detach(), -x.mean(dim=0))
    executor.destroy()


def trained_by_large_gradients(
    replicas: int, accumulations: int, strategy: poptorch.MeanReductionStrategy | None
) -> float:
    """The weight after one update by gradients of which two are too large a sum for float16."""
    model = Linear(torch.zeros(1, dtype=torch.float16))
    options = Layout(replicas, accumulations, 1).options().autoRoundNumIPUs(True)
    if strategy is not None:
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    optimizer = poptorch.optim.SGD(
        model.parameters(), lr=2**-10, accum_type=torch.float16 if strategy is None else None
    )
    executor = poptorch.trainingModel(model, options, optimizer)
    executor(torch.full((replicas * accumulations, 1), 30000.0, dtype=torch.float16))
    weight = model.w.item()
    executor.destroy()
    return weight


@pytest.mark.parametrize(("replicas", "accumulations"), [(4, 1), (1, 4), (3, 1), (2, 3)])
def test_a_running_mean_is_never_larger_than_what_it_is_of(
    replicas: int, accumulations: int
) -> None:
    found = trained_by_large_gradients(replicas, accumulations, None)
    assert found == pytest.approx(-30000 * 2**-10, rel=2e-3)


def test_dividing_after_the_sum_overflows_and_dividing_the_loss_does_not() -> None:
    strategies = poptorch.MeanReductionStrategy
    assert trained_by_large_gradients(4, 1, strategies.Post) == -math.inf
    assert trained_by_large_gradients(4, 1, strategies.PostAndLoss) == pytest.approx(-29.297, 1e-3)


# ---------------------------------------------------------------- groups of replicas


@pytest.mark.parametrize(
    ("kind", "size", "group_of"),
    [
        (poptorch.CommGroupType.Consecutive, 2, [0, 0, 1, 1]),
        (poptorch.CommGroupType.Orthogonal, 2, [0, 1, 0, 1]),
        (poptorch.CommGroupType.NoGrouping, 0, [0, 1, 2, 3]),
    ],
)
@pytest.mark.parametrize("every", [False, True])
def test_groups_of_replicas_have_weights_of_their_own(
    kind: poptorch.CommGroupType, size: int, group_of: list[int], every: bool
) -> None:
    strategies = poptorch.MeanReductionStrategy
    groups = max(group_of) + 1
    start = torch.randn(groups, 3)
    model = Linear(start)
    options = Layout(4, 2, 1).options()
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(
        strategies.Running if every else strategies.Post
    )
    executor = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1.0))
    retrieval = poptorch.VariableRetrievalMode
    mode = retrieval.AllReplicas if every else retrieval.OnePerGroup
    executor.w.replicaGrouping(kind, size, mode)
    x = torch.randn(8, 3)
    executor(x)
    wanted = start.clone()
    for number, row in enumerate(x):
        wanted[group_of[number % 4]] -= row / 8  # divided by all replicas, not by the group's
    torch.testing.assert_close(model.w.detach(), wanted[group_of] if every else wanted)
    executor(x)  # and what came back may go there again
    executor.copyWeightsToDevice()
    executor.destroy()


@pytest.mark.parametrize(
    ("weights", "size", "message"),
    [
        (torch.tensor(1.0), 2, "Scalars cannot be passed as per-replica weight tensor values"),
        (torch.ones(3, 2), 2, "its first dimension is 3, and Consecutive groups of 4 replicas "
         "are 2"),
        (torch.ones(3, 2), 3, "group_size"),
    ],
)  # fmt: skip
def test_groups_that_cannot_be(weights: Tensor, size: int, message: str) -> None:
    model = Linear(weights)
    executor = poptorch.trainingModel(model, Layout(4, 1, 1).options())
    executor.w.replicaGrouping(
        poptorch.CommGroupType.Consecutive, size, poptorch.VariableRetrievalMode.OnePerGroup
    )
    with pytest.raises(poptorch.Error, match=message):
        executor(torch.ones(4, 2))
    executor.destroy()
    assert copy.deepcopy(model).w.shape == weights.shape


def test_parameters_without_axes_or_elements_are_trained_too() -> None:
    """Their gradients are folded with the others."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 1)
            self.scale = torch.nn.Parameter(torch.tensor(1.0))
            self.none = torch.nn.Parameter(torch.ones(0, 3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.linear(x) * self.scale + self.none.sum()
            return y, poptorch.identity_loss(y.sum(), reduction="sum")

    torch.manual_seed(0)
    model = Scaled()
    options = Options().replicationFactor(2)
    trained = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.5))
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    loss = torch.stack([model(row[None])[0].sum() for row in x]).mean()
    changes = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
    trained(x)
    trained.copyWeightsToHost()
    for found, before, change in zip(model.parameters(), expected, changes, strict=True):
        assert change is not None
        torch.testing.assert_close(found.detach(), before - 0.5 * change)
