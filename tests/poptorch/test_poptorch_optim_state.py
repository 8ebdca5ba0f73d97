"""The state of PopTorch's optimizers: its names, and training that goes on with it."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim import poptorch
from gpusim.poptorch import optim
from gpusim.poptorch.optim.updater import Updater, updater_for
from tests.poptorch.optimized import (
    HALF,
    SHAPES,
    Make,
    Trained,
    assert_equal,
    assert_same,
    automatic_options,
    gradients,
    model,
    stacked,
    stochastic_options,
)

# ---------------------------------------------------------------- state


SLOTS: list[tuple[Make, set[str]]] = [
    (lambda p, **k: optim.SGD(p, lr=0.1, **k), set()),
    (lambda p, **k: optim.SGD(p, lr=0.1, momentum=0.9, **k), {"Accl1"}),
    (lambda p, **k: optim.SGD(p, lr=0.1, momentum=0.9, use_combined_accum=True, **k), {"Accl"}),
    (lambda p, **k: optim.SGD(p, lr=0.1, momentum=0.0, **k), {"Accl1"}),  # it may change
    (lambda p, **k: optim.Adam(p, **k), {"Accl1", "Accl2", "Step"}),
    (lambda p, **k: optim.AdamW(p, **k), {"Accl1", "Accl2", "Step"}),
    (lambda p, **k: optim.AdamW(p, bias_correction=False, **k), {"Accl1", "Accl2", "Step"}),
    (lambda p, **k: optim.RMSprop(p, **k), {"Accl1"}),
    (lambda p, **k: optim.RMSprop(p, centered=True, **k), {"Accl1", "Accl2"}),
    (lambda p, **k: optim.RMSprop(p, momentum=0.9, **k), {"Accl1", "Accl3"}),
    (lambda p, **k: optim.LAMB(p, **k), {"Accl1", "Accl2", "Step"}),
    (lambda p, **k: optim.LAMB(p, bias_correction=False, **k), {"Accl1", "Accl2"}),
]


@pytest.mark.parametrize(("make", "slots"), SLOTS)
class TestState:
    def test_is_empty_before_compilation(self, make: Make, slots: set[str]) -> None:
        parameters = model()
        optimizer = make(parameters.values())
        updater_for(optimizer, poptorch.Options(), parameters)
        state = optimizer.state_dict()
        assert state["ipu_state"] is None
        assert state["ipu_param"] is None
        assert not optimizer.has_state()
        assert state["param_groups"][0]["params"] == [0, 1, 2]

    def test_has_accumulators_by_popArts_names(self, make: Make, slots: set[str]) -> None:
        trained = Trained(make).step(2)
        found = trained.optimizer.state_dict()["ipu_state"]
        assert found.keys() == {f"{slot}___{name}" for slot in slots for name in SHAPES}
        for name, value in found.items():
            slot, parameter = name.split("___")
            assert value.shape == (() if slot == "Step" else SHAPES[parameter])
            assert value.dtype == torch.float32
            assert slot != "Step" or value == 2

    def test_leads_with_the_groups_of_replicas(self, make: Make, slots: set[str]) -> None:
        found = Trained(make, seeds=(0, 1, 2)).step().optimizer.state_dict()["ipu_state"]
        for slot in slots - {"Step"}:
            assert found[f"{slot}___lin.weight"].shape == (3, 5, 7)
        if "Step" in slots:
            assert found["Step___lin.weight"].tolist() == [1, 1, 1]

    def test_resumes_to_the_same_bits(self, make: Make, slots: set[str]) -> None:
        for options in (poptorch.Options, stochastic_options):
            self.check_resuming(make, options, seeds=(0,))
        self.check_resuming(make, poptorch.Options, seeds=(0, 1))

    def check_resuming(self, make: Make, options: Make, seeds: tuple[int, ...]) -> None:
        first = Trained(make, options=options(), dtype=HALF, seeds=seeds).step(3)
        saved, weights = copy.deepcopy(first.optimizer.state_dict()), copy.deepcopy(first.weights)
        resumed = Trained(make, options=options(), dtype=HALF, seeds=seeds)
        resumed.optimizer.load_state_dict(saved)
        resumed.weights, resumed.steps = weights, first.steps
        assert resumed.optimizer.ipu_state_is_dirty
        assert_equal(resumed.step(2).weights, first.step(2).weights)
        assert not resumed.optimizer.ipu_state_is_dirty

    def test_loaded_before_compilation_is_what_training_starts_with(
        self, make: Make, slots: set[str]
    ) -> None:
        first = Trained(make).step(3)
        parameters = model()
        optimizer = make(parameters.values())
        optimizer.load_state_dict(first.optimizer.state_dict())
        assert optimizer.has_state()
        updater = updater_for(optimizer, poptorch.Options(), parameters)
        updater.init(first.weights)
        assert_equal(optimizer.state_dict()["ipu_state"], first.optimizer.state_dict()["ipu_state"])

    def test_stays_with_the_optimizer_when_the_model_lets_go(
        self, make: Make, slots: set[str]
    ) -> None:
        trained = Trained(make).step(2)
        expected = trained.optimizer.state_dict()["ipu_state"]
        trained.updater.disconnect()
        assert_equal(trained.optimizer.state_dict()["ipu_state"], expected)
        copied = copy.copy(trained.optimizer)
        assert copied.has_state()
        assert copied.ipu_state_is_dirty
        assert_equal(copied.state_dict()["ipu_state"], expected)

    def test_values_are_there_by_parameter_if_they_are_variable(
        self, make: Make, slots: set[str]
    ) -> None:
        trained = Trained(lambda p: make(p, loss_scaling=0.75, weight_decay=0.025))
        values = trained.optimizer.state_dict()["ipu_param"]
        assert values["lossScaling_FLOAT"] == 0.75
        assert all(value.dtype == torch.float32 for value in values.values())
        if not isinstance(trained.optimizer, torch.optim.SGD):
            assert float(values["weightDecay___specific___lin.bias"]) == pytest.approx(0.025)
            assert "learningRate___specific___lin.bias" not in values  # a constant


def test_gradient_descents_values_are_popArts_products() -> None:
    trained = Trained(lambda p: optim.SGD(p, lr=0.05, weight_decay=0.025, loss_scaling=0.75))
    values = trained.optimizer.state_dict()["ipu_param"]
    scaled = float(values["scaledLearningRate0___specific___lin.weight"])
    decay = float(values["weightDecayScaleFactor0___specific___lin.weight"])
    assert scaled == pytest.approx(0.05 / 0.75)
    assert decay == pytest.approx(1 - 0.05 * 0.025)


def test_a_state_is_a_copy_of_its_time_and_read_again_when_it_is_newer() -> None:
    trained = Trained(optim.Adam).step()
    first = trained.optimizer.state_dict()["ipu_state"]
    kept = {name: value.clone() for name, value in first.items()}
    assert trained.optimizer.state_dict()["ipu_state"] is first  # nothing has happened since
    trained.step()
    second = trained.optimizer.state_dict()["ipu_state"]
    assert_equal(first, kept)
    assert second["Step___scale"] == 2
    assert not torch.equal(second["Accl1___lin.bias"], first["Accl1___lin.bias"])


def test_what_a_loaded_state_has_not_stays() -> None:
    trained = Trained(optim.Adam).step(2)
    saved = copy.deepcopy(trained.optimizer.state_dict())
    kept = saved["ipu_state"].pop("Accl1___lin.bias")
    saved["ipu_state"]["Accl1___lin.weight"].fill_(3.0)
    trained.updater.load_state_dict(saved)
    slots = trained.state.slots
    assert torch.equal(slots["lin.bias"]["Accl1"][0], kept)
    assert bool((slots["lin.weight"]["Accl1"] == 3).all())


def test_a_state_of_another_size_is_an_error_and_changes_nothing() -> None:
    trained = Trained(optim.Adam).step()
    before = copy.deepcopy(trained.state.slots)
    saved = copy.deepcopy(trained.optimizer.state_dict())
    saved["ipu_state"]["Accl2___lin.bias"] = torch.zeros(4)
    saved["ipu_state"]["Accl1___lin.weight"].fill_(3.0)
    with pytest.raises(ValueError, match=r"Accl2___lin.bias: .* shape \(4,\), expected 5 elements"):
        trained.updater.load_state_dict(saved)
    for name, slots in before.items():
        assert_equal(trained.state.slots[name], slots)


ONLY_IPU = r"Only IPU optimizer states can be loaded onto the IPU\."


def test_only_popTorchs_states_can_be_loaded() -> None:
    optimizer = optim.Adam(model().values(), lr=0.1)
    with pytest.raises(RuntimeError, match="Cannot load optimizer state dictionary because it is"):
        optimizer.load_state_dict({})
    torchs = torch.optim.Adam(model().values(), lr=0.9).state_dict()
    with pytest.raises(RuntimeError, match=ONLY_IPU):
        optimizer.load_state_dict(torchs)
    with pytest.raises(RuntimeError, match=ONLY_IPU):
        optimizer.set_state_dict(torchs)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_loaded_learning_rate_is_the_one_that_is_used() -> None:
    first = Trained(lambda p: optim.SGD(p, lr=0.5)).step()
    other = Trained(lambda p: optim.SGD(p, lr=0.1)).step()
    other.optimizer.load_state_dict(first.optimizer.state_dict())
    before = other.weights["scale"].clone()
    step = gradients(other.steps)["scale"]
    torch.testing.assert_close(other.step().weights["scale"], before - 0.5 * step)


def test_a_new_optimizer_goes_on_with_the_state_and_the_old_one_keeps_a_copy() -> None:
    def make(parameters: Iterable[Any]) -> Any:
        return optim.Adam(parameters, lr=0.1)

    trained, expected = Trained(make).step(2), Trained(make).step(4)
    old, new = trained.optimizer, make(trained.named.values())
    trained.updater.set_optimizer(new)
    assert_equal(trained.step(2).weights, expected.weights)
    assert old.state_dict()["ipu_state"]["Step___scale"] == 2
    assert new.state_dict()["ipu_state"]["Step___scale"] == 4


def test_accumulators_are_one_for_each_group_where_the_user_has_every_replicas_value() -> None:
    named = {"w": torch.nn.Parameter(torch.zeros(4, 3))}  # of four replicas in two groups
    optimizer = optim.Adam(named.values())
    updater_for(optimizer, poptorch.Options(), named).init({"w": torch.zeros(2, 3)})
    assert optimizer.state_dict()["ipu_state"]["Accl1___w"].shape == (2, 3)


def test_a_step_has_the_groups_in_front_also_if_there_is_one() -> None:
    named = {"w": torch.nn.Parameter(torch.zeros(1, 3)), "v": torch.nn.Parameter(torch.zeros(3))}
    optimizer = optim.Adam(named.values())
    updater = updater_for(optimizer, poptorch.Options(), named)
    updater.init({"w": torch.zeros(1, 3), "v": torch.zeros(1, 3)})
    state = optimizer.state_dict()["ipu_state"]
    assert state["Step___w"].shape == (1,) and state["Step___v"].shape == ()
    assert state["Accl1___w"].shape == (1, 3) and state["Accl1___v"].shape == (3,)


def test_groups_of_replicas_with_different_steps_are_an_error_and_change_nothing() -> None:
    trained = Trained(optim.Adam, seeds=(0, 1)).step(2)
    saved = copy.deepcopy(trained.optimizer.state_dict())
    saved["ipu_state"]["Step___lin.bias"][1] = 7
    saved["ipu_state"]["Step___lin.weight"].fill_(7)
    with pytest.raises(ValueError, match=r"Step___lin.bias: expected one step .* \[2.0, 7.0\]"):
        trained.updater.load_state_dict(saved)
    assert trained.state.steps["lin.weight"] == 2


def test_an_optimizer_brings_its_state_to_the_next_model() -> None:
    def make(parameters: Iterable[Any]) -> Any:
        return optim.Adam(parameters, lr=0.1)

    trained, expected = Trained(make).step(2), Trained(make).step(4)
    trained.updater.disconnect()
    again = updater_for(trained.optimizer, trained.options, trained.named)
    again.init(trained.weights)
    trained.updater, trained.state = again, again.state
    assert_equal(trained.step(2).weights, expected.weights)


def test_a_model_that_lets_go_leaves_an_optimizer_to_the_next_one_that_has_it() -> None:
    first = Trained(optim.Adam).step()
    second = updater_for(first.optimizer, first.options, first.named)
    second.init(first.weights)
    first.updater.disconnect()
    second.apply(first.weights, stacked([gradients(7)]))
    assert first.optimizer.state_dict()["ipu_state"]["Step___scale"] == 2


def test_torchs_optimizers_keep_their_own_state_dict() -> None:
    trained = Trained(lambda p: torch.optim.Adam(p, lr=0.1)).step()
    assert set(trained.optimizer.state_dict()) == {"state", "param_groups"}
    assert "Accl1___scale" in trained.updater.state_dict()["ipu_state"]


def test_automatic_loss_scaling_is_part_of_the_state() -> None:
    first = Trained(optim.Adam, options=automatic_options()).step(3)
    saved = first.optimizer.state_dict()
    assert saved["ipu_state"]["lossScaleUpdateFactor"] == 8
    second = Trained(optim.Adam, options=automatic_options())
    second.optimizer.load_state_dict(saved)
    second.step()
    assert second.updater.loss_scale == 16


def test_an_updater_keeps_the_callers_gradients() -> None:
    for make in (
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, max_grad_norm=0.1),
        lambda p: optim.LAMB(p, loss_scaling=2.0),
        lambda p: optim.RMSprop(p, centered=True, momentum=0.1, use_tf_variant=True),
    ):
        trained = Trained(make)
        given = stacked([gradients(0)])
        kept = copy.deepcopy(given)
        trained.updater.apply(trained.weights, given)
        assert_equal(given, kept)


def test_updaters_are_made_for_models_of_which_nothing_is_trained() -> None:
    updater = updater_for(optim.SGD(model().values(), lr=0.1), automatic_options(), {})
    assert isinstance(updater, Updater)
    updater.init({})
    updater.apply({}, {})
    assert set(updater.state_dict()["ipu_state"]) == {"lossScaleUpdateFactor"}


# ---------------------------------------------------------------- a changed state


def variable(make: Make) -> Make:
    """The optimizer, with all of its attributes variable."""

    def made(parameters: Iterable[Any]) -> Any:
        optimizer = make(parameters)
        attributes = optimizer.variable_attrs
        attributes._variable_attributes = [*attributes._allowed_attributes]
        return optimizer

    return made


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(("make", "slots"), SLOTS)
def test_a_changed_state_is_read_back_as_it_is_and_merged_by_the_next_run(
    make: Make, slots: set[str], complete: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    trained = Trained(variable(make))
    saved = trained.optimizer.state_dict()
    deleted: dict[str, tuple[str, Tensor]] = {}
    for part in ("ipu_param", "ipu_state"):
        if not complete and saved[part]:
            deleted[part] = saved[part].popitem()
        for name, value in saved[part].items():
            saved[part][name] = torch.randn(value.shape, generator=generator)
    expected = copy.deepcopy(saved)
    trained.optimizer.load_state_dict(saved)
    read = trained.optimizer.state_dict()
    for part in ("ipu_param", "ipu_state"):
        assert_equal(read[part], expected[part])

    read = trained.step().optimizer.state_dict()
    values = expected["ipu_param"] | dict([deleted["ipu_param"]] if not complete else [])
    assert_equal(read["ipu_param"], values)
    states = expected["ipu_state"] | dict([deleted["ipu_state"]] if "ipu_state" in deleted else [])
    assert read["ipu_state"].keys() == states.keys()
    for name, value in states.items():
        assert not torch.allclose(read["ipu_state"][name], value)
    before = {name: weight.clone() for name, weight in trained.weights.items()}
    trained.updater.set_optimizer(trained.optimizer)  # which has no other values
    assert_equal(trained.optimizer.state_dict()["ipu_param"], values)
    assert any(not torch.equal(before[name], trained.step().weights[name]) for name in before)


#: Optimizers with values that are exact in float32, other values, and a tolerance.
CHANGED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], float]] = {
    "SGD": (optim.SGD, {"lr": 0.5, "weight_decay": 0.25}, {"lr": 0.25, "weight_decay": 0.5}, 1e-6),
    "momentum": (
        optim.SGD,
        {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.25, "dampening": 0.0},
        {"lr": 0.25, "momentum": 0.75, "weight_decay": 0.5, "dampening": 0.5},
        1e-6,
    ),
    "combined": (
        lambda p, **k: optim.SGD(p, use_combined_accum=True, **k),
        {"lr": 0.5, "momentum": 0.5, "velocity_scaling": 2.0},
        {"lr": 0.25, "momentum": 0.75, "velocity_scaling": 4.0},
        1e-6,
    ),
    "Adam": (
        optim.Adam,
        {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.125, "weight_decay": 0.25},
        {"lr": 0.25, "betas": (0.25, 0.5), "eps": 0.25, "weight_decay": 0.5},
        0.0,
    ),
    "LAMB": (
        optim.LAMB,
        {"lr": 0.5, "weight_decay": 0.25, "max_weight_norm": 2.0},
        {"lr": 0.25, "weight_decay": 0.5, "max_weight_norm": 1.0},
        0.0,
    ),
    "RMSprop": (
        optim.RMSprop,
        {"lr": 0.5, "alpha": 0.5, "momentum": 0.25, "eps": 0.5},
        {"lr": 0.25, "alpha": 0.75, "momentum": 0.5, "eps": 0.25},
        0.0,
    ),
}


@pytest.mark.parametrize("scaling", [1.0, 4.0])
@pytest.mark.parametrize("case", CHANGED)
def test_a_loaded_ipu_param_has_the_effect_of_the_attributes(
    case: str, scaling: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Without changed param_groups; `setOptimizer` with another value ends it."""
    kind, first, second, tolerance = CHANGED[case]

    def make(parameters: Iterable[Any]) -> Any:
        return kind(parameters, loss_scaling=2.0, **first)

    expected, trained = Trained(make).step(2), Trained(make).step(2)
    other = expected.optimizer
    other.loss_scaling = 2.0 * scaling
    for name, value in second.items():
        other.param_groups[0][name] = value
    expected.updater.set_optimizer(other)
    state = trained.optimizer.state_dict()
    state["ipu_param"] = expected.optimizer.state_dict()["ipu_param"]
    caplog.clear()
    trained.optimizer.load_state_dict(copy.deepcopy(state))
    again = copy.deepcopy(trained.optimizer)
    trained.updater.pull()  # as an executor does before it scales the loss
    trained.step(3)
    expected.step(3)
    assert_same(trained.weights, expected.weights, rtol=tolerance, atol=tolerance)
    [told] = [text for text in caplog.messages if "loaded ipu_param" in text]
    assert "___specific___lin.weight=" in told and ("lossScaling" in told) == (scaling != 1)
    # a copy of the optimizer has it too
    third = Trained(make).step(2)
    again.param_groups[0]["params"] = [*third.named.values()]
    third.updater.set_optimizer(again)
    third.updater.pull()
    assert_equal(third.step(3).weights, trained.weights)

    for each in (trained, expected):
        each.optimizer.param_groups[0].update(first, lr=0.125)
        each.optimizer.loss_scaling = 2.0
        each.updater.set_optimizer(each.optimizer)
    found, right = (each.optimizer.state_dict()["ipu_param"] for each in (trained, expected))
    assert_equal(found, right)


def test_an_ipu_param_that_agrees_changes_no_bit_and_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make(parameters: Iterable[Any]) -> Any:
        return optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.3, loss_scaling=3.0)

    trained, expected = Trained(make).step(2), Trained(make).step(4)
    trained.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))
    assert_equal(trained.step(2).weights, expected.weights)
    assert "ipu_param" not in caplog.text


@pytest.mark.parametrize(
    ("make", "name", "value", "message"),
    [
        (optim.Adam, "learningRate___specific___scale", [1.0, 2.0], r"shape \(2,\), expected one"),
        (optim.Adam, "lossScaling_FLOAT", [0.0], "the loaded loss scaling is 0"),
        (
            lambda p, **k: optim.SGD(p, momentum=0.9, nesterov=True, **k),
            "scaledMomentum2___specific___scale",
            [0.5],
            "with nesterov=True they cannot differ",
        ),
    ],
)
def test_an_ipu_param_that_cannot_be_computed_with_is_refused_and_changes_nothing(
    make: Any, name: str, value: list[float], message: str
) -> None:
    trained = Trained(lambda p: make(p, lr=0.5, loss_scaling=2.0)).step()
    state = copy.deepcopy(trained.optimizer.state_dict())
    assert name in state["ipu_param"]
    state["ipu_param"][name] = torch.tensor(value)
    before = {parameter: weight.clone() for parameter, weight in trained.weights.items()}
    trained.optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match=message):
        trained.step()
    assert_equal(trained.weights, before)
