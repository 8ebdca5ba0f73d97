"""What PopTorch's optimizers say, what they refuse, and what setOptimizer may change."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from gpusim import poptorch
from gpusim.poptorch import optim
from gpusim.poptorch.enums import MeanReductionStrategy
from gpusim.poptorch.optim.updater import updater_for
from tests.poptorch.optimized import (
    CLOSE,
    HALF,
    Make,
    Trained,
    assert_equal,
    assert_same,
    by_torch,
    gradients,
    model,
    stacked,
)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What PopTorch's logger says, as a list that grows."""
    texts: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    listener = Listener(logging.WARNING)
    poptorch.logger.addHandler(listener)
    yield texts
    poptorch.logger.removeHandler(listener)


# ---------------------------------------------------------------- what optimizers say


SIGNATURES = {
    "SGD": "params lr momentum dampening weight_decay nesterov maximize foreach differentiable "
    "loss_scaling velocity_scaling use_combined_accum accum_type velocity_accum_type max_grad_norm",
    "Adam": "params lr betas eps weight_decay amsgrad foreach maximize capturable differentiable "
    "fused loss_scaling accum_type first_order_momentum_accum_type "
    "second_order_momentum_accum_type max_grad_norm",
    "AdamW": "params lr betas eps weight_decay amsgrad maximize foreach capturable differentiable "
    "fused loss_scaling bias_correction accum_type first_order_momentum_accum_type "
    "second_order_momentum_accum_type max_grad_norm",
    "RMSprop": "params lr alpha eps weight_decay momentum centered foreach maximize differentiable "
    "loss_scaling accum_type first_order_momentum_accum_type second_order_momentum_accum_type "
    "use_tf_variant",
    "LAMB": "params lr betas eps weight_decay bias_correction loss_scaling max_weight_norm "
    "accum_type first_order_momentum_accum_type second_order_momentum_accum_type",
}
ALL = [getattr(optim, name) for name in SIGNATURES]


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_popTorchs_names_order_and_defaults(name: str) -> None:
    found = list(inspect.signature(getattr(optim, name)).parameters.values())
    assert " ".join(parameter.name for parameter in found) == SIGNATURES[name]
    mandatory = [p.name for p in found if p.default is inspect.Parameter.empty]
    assert mandatory == (["params", "lr"] if name == "SGD" else ["params"])
    assert all(p.default is None for p in found if p.name not in mandatory)


@pytest.mark.parametrize("kind", ALL)
def test_an_optimizer_is_torchs_too_and_has_torchs_defaults(kind: Any) -> None:
    optimizer = kind(model().values(), lr=0.25)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, optim.Optimizer)
    assert optimizer.loss_scaling == 1.0
    assert optimizer.accum_type == torch.float32
    if kind is not optim.LAMB:
        torchs = kind.__bases__[1](model().values(), lr=0.25)
        assert isinstance(optimizer, type(torchs))
        assert optimizer.defaults == torchs.defaults


def test_lamb_has_popTorchs_defaults() -> None:
    assert optim.LAMB(model().values()).defaults == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "max_weight_norm": 65500.0,
    }


@pytest.mark.parametrize("kind", ALL)
def test_what_is_given_is_variable_and_what_is_not_is_constant(kind: Any) -> None:
    attributes = kind(model().values(), lr=0.1, weight_decay=0.0).variable_attrs
    assert not attributes.isConstant("lr")
    assert not attributes.isConstant("weight_decay")
    assert attributes.isConstant("loss_scaling")
    attributes.markAsVariable("loss_scaling")
    attributes.markAsConstant("weight_decay")
    assert not attributes.isConstant("loss_scaling")
    assert attributes.isConstant("weight_decay")
    with pytest.raises(AssertionError, match=r"Unknown attribute speed, allowed values: \['lr'"):
        attributes.markAsConstant("speed")


def test_a_velocity_scaling_is_a_value_of_groups_with_combined_accumulators_only(
    said: list[str],
) -> None:
    combined = optim.SGD(model().values(), lr=0.1, use_combined_accum=True, velocity_scaling=4.0)
    assert combined.param_groups[0]["velocity_scaling"] == 4.0
    assert not combined.variable_attrs.isConstant("velocity_scaling")
    combined.variable_attrs.markAsConstant("velocity_scaling")
    assert not said
    separate = optim.SGD(model().values(), lr=0.1, velocity_scaling=4.0)
    assert "velocity_scaling" not in separate.param_groups[0]
    assert said == [
        "velocity_scaling value ignored when using the separate variant "
        "(use_combined_accum=False). In future, this will lead to an error. Please update your "
        "code."
    ]


@pytest.mark.parametrize(
    ("kind", "name"),
    [(optim.SGD, "velocity_accum_type"), (optim.Adam, "accum_type"), (optim.LAMB, "accum_type")],
)
def test_accumulators_are_float16_or_float32(kind: Any, name: str) -> None:
    with pytest.raises(AssertionError, match=r"either torch\.float32 or torch\.float16"):
        kind(model().values(), lr=0.1, **{name: torch.bfloat16})
    changed = kind(model().values(), lr=0.1)
    setattr(changed, name, torch.bfloat16)
    message = f"{name} must be set to either torch.float16 or torch.float32 not torch.bfloat16"
    with pytest.raises(ValueError, match=message):
        updater_for(changed, poptorch.Options(), model())


REFUSED: list[tuple[Make, type[Exception], str]] = [
    (
        lambda p: torch.optim.Adagrad(p),
        AssertionError,
        r"Unsupported optimizer type. Types supported \[<OptimizerType.SGD1: 0>",
    ),
    (
        lambda p: torch.optim.Adam(p, amsgrad=True),
        ValueError,
        "Only non-amsgrad Adam/AdamW optimizers are supported.",
    ),
    (
        lambda p: optim.AdamW(p, amsgrad=True),
        ValueError,
        "Only non-amsgrad Adam/AdamW optimizers are supported.",
    ),
    (
        lambda p: altered(optim.Adam(p), use_tf_variant=True),
        ValueError,
        "use_tf_variant is only available with RMSProp optimizers.",
    ),
    (lambda p: optim.Adam(p, max_grad_norm=math.nan), ValueError, "max_grad_norm must not be NaN"),
    (lambda p: optim.Adam(p, loss_scaling=0.0), ValueError, "Loss scaling cannot be 0"),
    (
        lambda p: altered(optim.Adam(p), loss_scaling=None),
        AssertionError,
        "Mandatory attribute loss_scaling not found in optimizer attributes",
    ),
    (
        lambda p: of_group(optim.Adam(p), lr="fast"),
        AssertionError,
        "Expected a number for lr but got fast instead",
    ),
    (
        lambda p: of_group(optim.Adam(p), betas=[0.9, 0.999]),
        AssertionError,
        r"Expected a pair for betas but got \[0.9, 0.999\] instead",
    ),
    (
        lambda p: of_group(optim.Adam(p), betas=(0.9, "x")),
        AssertionError,
        r"Expected a number for betas\[1\] but got x instead",
    ),
    (
        lambda p: of_group(optim.Adam(p), eps=None),
        AssertionError,
        "Mandatory attribute eps not found in optimizer group",
    ),
    (
        lambda p: torch.optim.RMSprop([{"params": [q], "centered": i == 1} for i, q in en(p)]),
        AssertionError,
        "same value for the 'centered' attribute .Group 0: False / Group 1: True.",
    ),
]


def en(parameters: Iterable[Any]) -> list[tuple[int, Any]]:
    return list(enumerate(parameters))


def altered(optimizer: Any, **attributes: Any) -> Any:
    vars(optimizer).update(attributes)
    return optimizer


def of_group(optimizer: Any, **values: Any) -> Any:
    optimizer.param_groups[0].update(values)
    return optimizer


@pytest.mark.parametrize(("make", "error", "message"), REFUSED)
def test_what_is_refused(make: Make, error: type[Exception], message: str) -> None:
    parameters = model()
    with pytest.raises(error, match=message):
        updater_for(make(parameters.values()), poptorch.Options(), parameters)


def test_nesterov_needs_no_dampening_also_if_it_is_set_later() -> None:
    optimizer = of_group(torch.optim.SGD(model().values(), lr=0.1), nesterov=True, dampening=0.5)
    with pytest.raises(ValueError, match=r"dampening has to be 0, not 0.5"):
        updater_for(optimizer, poptorch.Options(), model())


def test_torchs_adam_with_decoupled_decay_is_adamw() -> None:
    def make(parameters: Iterable[Any]) -> Any:
        return torch.optim.Adam(parameters, weight_decay=0.3, decoupled_weight_decay=True)

    assert_same(Trained(make).step(3).weights, by_torch(make, 3), **CLOSE)


def test_subclasses_and_maximize_are_warned_about_once(said: list[str]) -> None:
    class Mine(torch.optim.SGD):
        pass

    parameters = model()
    optimizer = Mine(parameters.values(), lr=0.1, maximize=True)
    updater = updater_for(optimizer, poptorch.Options(), parameters)
    updater.set_optimizer(optimizer)
    subclass, maximize = said
    assert subclass.startswith("Optimizer `Mine` subclassed from classes in poptorch.optim or")
    assert maximize == "maximize=True is ignored: PopTorch's optimizers minimize the loss"


# ---------------------------------------------------------------- attributes that nothing reads


def test_attributes_that_appear_later_are_reported_once(said: list[str]) -> None:
    trained = Trained(lambda p: optim.SGD(p, lr=0.1, loss_scaling=2.0, use_combined_accum=True))
    optimizer = trained.optimizer
    optimizer.param_groups[0]["loss_scaling"] = 4.0  # that of the optimizer is the one
    optimizer.lr = 0.5  # those of groups are
    trained.updater.set_optimizer(optimizer)
    assert said == [
        "Ignoring unexpected optimizer attribute in SGD1 optimizer: ['lr']",
        "Ignoring unexpected group 0 attribute in SGD1 optimizer: ['loss_scaling']",
    ]
    trained.updater.set_optimizer(optimizer)
    assert len(said) == 2


def test_attributes_that_were_there_at_first_are_not_reported(said: list[str]) -> None:
    parameters = model()
    optimizer = optim.SGD(parameters.values(), lr=0.1)
    optimizer.param_groups[0]["initial_lr"] = 0.1
    optimizer.extra = 1
    updater = updater_for(optimizer, poptorch.Options(), parameters)
    updater.set_optimizer(optimizer)
    assert not said


def test_the_checks_can_be_relaxed(said: list[str]) -> None:
    options = poptorch.Options().relaxOptimizerAttributesChecks()
    trained = Trained(lambda p: optim.SGD(p, lr=0.1), options=options)
    trained.optimizer.lr = 0.5
    trained.updater.set_optimizer(trained.optimizer)
    assert not said


# ---------------------------------------------------------------- the log


FLOAT32 = (
    "accumType=float32, firstOrderMomentumAccumType=float32, secondOrderMomentumAccumType=float32"
)
TYPES16: dict[str, Any] = {
    "accum_type": HALF,
    "first_order_momentum_accum_type": HALF,
    "second_order_momentum_accum_type": HALF,
}
ADAM = "beta1=0.9 (const), beta2=0.999 (const), eps=1e-08 (const)"
#: The optimizer, its kind, the values of a group, the loss scaling, and types.
LOGGED: list[tuple[Make, str, str, str, str]] = [
    (
        lambda p: optim.SGD(p, lr=0.01),
        "SGD2",
        "learningRate=0.01, weightDecay=0 (const), momentum=0 (const), dampening=0 (const), "
        "velocityScaling=1 (const), nesterov=0 (const)",
        "1 (const)",
        FLOAT32,
    ),
    (
        lambda p: optim.SGD(
            p, lr=2, momentum=0.9, loss_scaling=128.0, accum_type=HALF, velocity_accum_type=HALF
        ),
        "SGD2",
        "learningRate=2, weightDecay=0 (const), momentum=0.9, dampening=0 (const), "
        "velocityScaling=128, nesterov=0 (const)",
        "128",
        "accumType=float16, firstOrderMomentumAccumType=float16, "
        "secondOrderMomentumAccumType=float32",
    ),
    (
        lambda p: optim.SGD(
            p, lr=0.1, momentum=0.5, nesterov=True, velocity_scaling=4.0, use_combined_accum=True
        ),
        "SGD1",
        "learningRate=0.1, weightDecay=0 (const), momentum=0.5, dampening=0 (const), "
        "velocityScaling=4, nesterov=1",
        "1 (const)",
        FLOAT32,
    ),
    (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
        "SGD2",
        "learningRate=0.1, weightDecay=0 (const), momentum=0.5, dampening=0 (const), "
        "velocityScaling=1 (const), nesterov=0 (const)",
        "1 (const)",
        FLOAT32,
    ),
    (
        lambda p: optim.Adam(p, **TYPES16),
        "ADAM",
        f"learningRate=0.001 (const), weightDecay=0 (const), {ADAM}",
        "1 (const)",
        FLOAT32.replace("32", "16"),
    ),
    (
        lambda p: optim.AdamW(p, lr=1e-4, betas=(0.5, 0.25), bias_correction=False),
        "ADAMW",
        "learningRate=0.0001, weightDecay=0.01 (const), beta1=0.5, beta2=0.25, eps=1e-08 (const)",
        "1 (const)",
        FLOAT32,
    ),
    (
        lambda p: optim.RMSprop(p, lr=0.1, alpha=0.5, centered=True, loss_scaling=2.0),
        "RMSPROP",
        "learningRate=0.1, weightDecay=0 (const), alpha=0.5, momentum=0 (const), eps=1e-08 (const)",
        "2",
        FLOAT32,
    ),
    (
        lambda p: optim.LAMB(p, lr=0.1, bias_correction=False),
        "LAMB",
        f"learningRate=0.1, weightDecay=0.01 (const), {ADAM}, maxWeightNorm=65500 (const)",
        "1 (const)",
        FLOAT32,
    ),
]


@pytest.fixture
def updating(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Take the lines about values from the DEBUG log."""
    caplog.set_level(logging.DEBUG, poptorch.logger.name)

    def take() -> list[str]:
        texts = [text for text in caplog.messages if text.startswith("Updating ")]
        caplog.clear()
        return texts

    return take


@pytest.mark.parametrize(("make", "kind", "values", "scaling", "types"), LOGGED)
def test_values_are_logged_when_they_are_sent(
    make: Make, kind: str, values: str, scaling: str, types: str, updating: Callable[[], list[str]]
) -> None:
    Trained(make)
    defaults = [f"default{value[0].upper()}{value[1:]}" for value in values.split(", ")]
    assert updating() == [
        f"Updating graph optimizer with {kind}, {', '.join(defaults)}, lossScaling={scaling}, "
        f"{types}",
        f"Updating group 0 optimizer with {kind}, {values}, {types} "
        "for (tensors affected [lin.weight, lin.bias, scale])",
    ]


def test_values_are_logged_only_if_they_differ(updating: Callable[[], list[str]]) -> None:
    def make(parameters: Iterable[Any], lr: float) -> Any:
        first, *others = parameters
        return optim.SGD([{"params": [first], "lr": lr}, {"params": others}], lr=0.5)

    trained = Trained(lambda p: make(p, 0.25))
    graph, first, second = updating()
    assert "defaultLearningRate=0.5, " in graph
    assert "group 0" in first and "learningRate=0.25, " in first and "[lin.weight]" in first
    assert "group 1" in second and "learningRate=0.5, " in second and "[lin.bias, scale]" in second
    trained.step(2)
    trained.updater.set_optimizer(trained.optimizer)
    trained.updater.set_optimizer(make(trained.named.values(), 0.125))  # is not used
    trained.updater.set_optimizer(make(trained.named.values(), 0.25))
    trained.step()
    assert updating() == []
    trained.updater.set_optimizer(make(trained.named.values(), 0.125))
    assert updating() == []  # the next update uses them
    trained.step(2)
    assert [line.split(",")[1] for line in updating()] == [
        " defaultLearningRate=0.5", " learningRate=0.125", " learningRate=0.5"
    ]  # fmt: skip


def test_a_model_logs_the_values_that_it_is_compiled_with(
    updating: Callable[[], list[str]],
) -> None:
    layer = torch.nn.Linear(2, 1)
    trained = poptorch.trainingModel(Loss(layer), optimizer=optim.SGD(layer.parameters(), lr=0.1))
    assert updating() == []
    trained.compile(torch.ones(1, 2))
    assert len(updating()) == 2
    trained(torch.ones(1, 2))
    assert updating() == []
    trained.setOptimizer(optim.SGD(layer.parameters(), lr=0.2))
    trained(torch.ones(1, 2))
    graph, group = updating()
    assert "defaultLearningRate=0.2, " in graph and "learningRate=0.2, " in group


class Loss(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.layer(x), "mean")


def test_values_are_described_for_the_debug_log_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    described: list[Any] = []
    monkeypatch.setattr("gpusim.poptorch.optim.updater.log_values", described.append)
    for level in (logging.INFO, logging.DEBUG):
        caplog.set_level(level, poptorch.logger.name)
        trained = Trained(lambda p: optim.SGD(p, lr=0.1)).step()
        assert described == [trained.updater.settings] * (level == logging.DEBUG)


# ---------------------------------------------------------------- setOptimizer


def test_variable_values_may_change_after_compilation() -> None:
    def make(parameters: Iterable[Any]) -> Any:
        return optim.SGD(parameters, lr=0.1, momentum=0.9, loss_scaling=2.0)

    trained = Trained(make).step(2)
    trained.optimizer.param_groups[0]["lr"] = 0.0
    before = copy.deepcopy(trained.weights)
    trained.step()
    assert not torch.equal(trained.weights["scale"], before["scale"])  # not set yet
    trained.updater.set_optimizer(trained.optimizer)
    before = copy.deepcopy(trained.weights)
    assert_equal(trained.step().weights, before)
    trained.optimizer.loss_scaling = 8.0
    trained.updater.set_optimizer(trained.optimizer)
    assert trained.updater.loss_scale == 8.0
    trained.updater.set_optimizer(make(trained.named.values()))
    assert trained.updater.loss_scale == 2.0


INVALID: list[tuple[Make, Make, str]] = [
    (
        lambda p: optim.SGD(p, lr=0.1),
        lambda p: optim.Adam(p, lr=0.1),
        "Can not replace optimizer of type SGD2 with new optimizer of type ADAM",
    ),
    (
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1),
        "Can not replace optimizer of type ADAM with new optimizer of type ADAMW",
    ),
    (
        lambda p: optim.SGD(p, lr=0.1),
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        "Problem with momentums. Was constant, and is variable",
    ),
    (
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1),
        "Problem with weight decays. Was variable, and is constant",
    ),
    (
        lambda p: torch.optim.Adam(p, betas=(0.9, 0.9)),
        lambda p: torch.optim.Adam(p, betas=(0.9, 0.99)),
        r"Problem with betas. Constant, \(0.9, 0.9\), and given as \(0.9, 0.99\)",
    ),
    (
        lambda p: optim.Adam(p),
        lambda p: of_group(optim.Adam(p), eps=1e-4),
        "Problem with eps. Constant, 1e-08, and given as 0.0001",
    ),
    (
        lambda p: optim.Adam(p),
        lambda p: optim.Adam(p, loss_scaling=2.0),
        "Problem with loss scaling. Was constant, and is variable",
    ),
    (
        lambda p: optim.Adam(p, max_grad_norm=1.0),
        lambda p: optim.Adam(p, max_grad_norm=2.0),
        "Clip norm settings do not match: max_grad_norm was 1.0 and is 2.0",
    ),
    (
        lambda p: optim.Adam(p),
        lambda p: optim.Adam(p, first_order_momentum_accum_type=HALF),
        "Accumulation types do not match",
    ),
    (
        lambda p: optim.RMSprop(p),
        lambda p: optim.RMSprop(p, use_tf_variant=True),
        "use_tf_variant does not match",
    ),
    (
        lambda p: optim.Adam(p),
        lambda p: optim.Adam(p, accum_type=HALF),
        "meanAccumulationAndReplicationReductionStrategy to poptorch.MeanReductionStrategy.Running "
        "but the executable is already compiled.",
    ),
]


@pytest.mark.parametrize(("first", "second", "message"), INVALID)
def test_what_is_compiled_in_cannot_change(first: Make, second: Make, message: str) -> None:
    trained = Trained(first).step()
    expected = Trained(first).step(2)
    with pytest.raises(ValueError, match=message):
        trained.updater.set_optimizer(second(trained.named.values()))
    assert_equal(trained.step().weights, expected.weights)  # with the one that there was


def test_a_parameter_that_joins_may_have_values_of_its_own() -> None:
    trained = Trained(lambda p: torch.optim.SGD(list(p)[:2], lr=0.1)).step()
    group = {"params": [trained.named["scale"]], "momentum": 0.9}
    trained.optimizer.add_param_group(group)
    trained.updater.set_optimizer(trained.optimizer)
    trained.step()
    assert set(trained.state.slots["scale"]) == {"Accl1"}
    assert not trained.state.slots["lin.bias"]


def test_a_parameter_that_leaves_stays_as_it_is() -> None:
    trained = Trained(lambda p: optim.SGD(p, lr=0.1, momentum=0.9)).step()
    others = [value for name, value in trained.named.items() if name != "scale"]
    trained.updater.set_optimizer(optim.SGD(others, lr=0.1, momentum=0.9))
    before = {name: value.clone() for name, value in trained.weights.items()}
    trained.step()
    changed = {name for name in before if not torch.equal(before[name], trained.weights[name])}
    assert changed == {"lin.weight", "lin.bias"}


def test_before_compilation_any_optimizer_can_be_set() -> None:
    parameters = model()
    updater = updater_for(optim.SGD(parameters.values(), lr=0.1), poptorch.Options(), parameters)
    updater.set_optimizer(optim.Adam(parameters.values(), accum_type=HALF))
    assert updater.strategy == MeanReductionStrategy.Running
    state = updater.init(stacked([parameters]))
    assert set(state.slots["scale"]) == {"Accl1", "Accl2"}


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_torchs_optimizer_and_popTorchs_replace_each_other(kind: str, said: list[str]) -> None:
    torchs, own = getattr(torch.optim, kind), getattr(optim, kind)
    trained = Trained(lambda p: torchs(p, lr=0.1)).step()
    expected = Trained(lambda p: own(p, lr=0.1)).step(3)
    trained.updater.set_optimizer(own(trained.named.values(), lr=0.1))
    trained.step()
    trained.updater.set_optimizer(torchs(trained.named.values(), lr=0.1))
    assert_equal(trained.step().weights, expected.weights)
    assert not said


def test_invalid_replacements_are_popTorchs_errors_too() -> None:
    trained = Trained(lambda p: optim.SGD(p, lr=0.1))
    with pytest.raises(poptorch.Error) as raised:
        trained.updater.set_optimizer(optim.Adam(trained.named.values()))
    assert raised.value.type == "popart_exception"
    assert raised.value.message.startswith("New optimizer is not a valid replacement. ")


def test_a_learning_rate_scheduler_works() -> None:
    trained = Trained(lambda p: optim.SGD(p, lr=1.0))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(trained.optimizer, 0.5)
    before = trained.weights["scale"].clone()
    trained.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a schedule without steps
        scheduler.step()
    trained.updater.set_optimizer(trained.optimizer)
    trained.step()
    steps = gradients(0)["scale"] + 0.5 * gradients(1)["scale"]
    torch.testing.assert_close(trained.weights["scale"], before - steps)


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_velocity_scalings_of_groups_are_ignored_without_combined_accumulators(
    momentum: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    def groups(named: Any) -> Any:
        return [{"params": [parameter]} for parameter in named]

    def make(named: Any) -> Any:
        return optim.SGD(groups(named), lr=0.1, momentum=momentum, loss_scaling=2.0)

    plain, trained = Trained(make).step(), Trained(make).step()
    optimizer = trained.optimizer
    for number, attributes in enumerate(([], ["velocity_scaling"])):
        optimizer.param_groups[1]["velocity_scaling"] = 4.0 + number
        optimizer.defaults["velocity_scaling"] = 8.0
        optimizer.variable_attrs._variable_attributes += attributes
        trained.updater.set_optimizer(optimizer)
        assert_equal(trained.step().weights, plain.step().weights)
    new = make(trained.named.values())
    new.param_groups[2]["velocity_scaling"] = 0.5
    trained.updater.set_optimizer(new)
    assert_equal(trained.step().weights, plain.step().weights)
    told = [text for text in caplog.messages if "velocity_scaling" in text]
    assert told and all(text.startswith("Ignoring unexpected ") for text in told)


def test_velocity_scalings_of_groups_count_with_combined_accumulators() -> None:
    def make(named: Any) -> Any:
        return optim.SGD(named, lr=0.1, momentum=0.9, use_combined_accum=True)

    trained = Trained(make).step()
    trained.optimizer.param_groups[0]["velocity_scaling"] = 4.0
    with pytest.raises(poptorch.Error, match="Problem with velocity scalings"):
        trained.updater.set_optimizer(trained.optimizer)
