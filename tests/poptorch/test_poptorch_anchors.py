"""Anchored tensors: values and gradients of a model by their names."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from gpusim import poptorch
from tests.poptorch.replica_models import MLP, Model, classes, inputs, mean, run


def anchoring(*names: str) -> poptorch.Options:
    options = poptorch.Options()
    for name in names:
        options.anchorTensor(f"short {name}", name)
    return options


def test_tensors_have_names_and_can_be_anchored(execution: str) -> None:
    model, given = MLP(), inputs(3, classes)
    names = ["hidden/linear:0", "relu:0", "Gradient___model.out.bias", "out.bias"]
    program, step = run(model, given, execution, options=anchoring(*names))
    assert {*names} - {*program.names} == {"Gradient___model.out.bias"}
    assert {"out/linear:0", "cross_entropy:0", "Gradient___hidden.weight"} <= {*program.names}
    assert [*step.anchors] == names
    hidden = torch.stack([model.hidden(x).detach() for x in given[0]])
    torch.testing.assert_close(step.anchors["hidden/linear:0"], hidden)
    torch.testing.assert_close(step.anchors["relu:0"], hidden.relu())
    assert torch.equal(step.anchors["Gradient___model.out.bias"], step.gradients["out.bias"])
    assert torch.equal(step.anchors["out.bias"], model.out.bias.detach().expand(3, -1))


def test_an_operator_that_runs_twice_has_two_names() -> None:
    model = Model(lambda self, x: mean(x.relu() @ self.w.relu()))
    program, _ = run(model, inputs(1), None)
    assert [name for name in program.names if "relu" in name] == ["relu:0", "relu/1:0"]


def test_anchored_gradients_are_those_of_the_scaled_loss() -> None:
    model, given = MLP(), inputs(2, classes)
    name = "Gradient___hidden.weight"
    _, plain = run(model, given, None, options=anchoring(name))
    _, scaled = run(model, given, None, options=anchoring(name), loss_scale=64.0)
    assert torch.equal(scaled.anchors[name], 64 * plain.anchors[name])


def test_gradients_of_what_was_computed_can_be_anchored(execution: str) -> None:
    names = ["Gradient___hidden/linear:0", "Gradient___relu:0", "Gradient___model.out/linear:0"]
    model, given = MLP(), inputs(3, classes)
    _, plain = run(model, given, execution)
    _, step = run(model, given, execution, options=anchoring(*names), loss_scale=4.0)
    for name, gradient in plain.gradients.items():
        assert torch.equal(step.gradients[name], 4 * gradient)
    for replica in range(3):
        hidden = model.hidden(given[0][replica])
        active = hidden.relu()
        y = model.out(active)
        loss = 4 * F.cross_entropy(y, given[1][replica])
        for name, wanted in zip(names, torch.autograd.grad(loss, [hidden, active, y]), strict=True):
            torch.testing.assert_close(step.anchors[name][replica], wanted)


def test_a_loss_whose_gradient_is_anchored_is_still_the_loss(execution: str) -> None:
    model = Model(lambda self, x: mean(3 * F.mse_loss(x @ self.w, x)))
    given = inputs(2)
    name = "Gradient___mse_loss:0"
    program, step = run(model, given, execution, options=anchoring(name))
    assert program.losses == ("mse_loss", "identity_loss")
    assert step.anchors[name].tolist() == [3, 3]
    assert not any(x.requires_grad for x in (*step.anchors.values(), *step.gradients.values()))


def test_inference_has_no_gradients_to_anchor(execution: str) -> None:
    for name in ("Gradient___w", "Gradient___relu:0"):
        with pytest.raises(poptorch.Error, match="is none of the model's"):
            run(
                Model(lambda self, x: (x @ self.w).relu()),
                inputs(2),
                execution,
                training=False,
                options=anchoring(name),
            )


def test_an_anchor_that_there_is_not_is_an_error() -> None:
    with pytest.raises(poptorch.Error, match="Anchored tensor 'nothing' is none of the model's: w"):
        run(Model(lambda self, x: mean(x @ self.w)), inputs(1), None, options=anchoring("nothing"))
