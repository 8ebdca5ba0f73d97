"""Weights that a training and an inference model of the same module share, on host and device."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpusim import poptorch
from gpusim.poptorch import Options

pytestmark = pytest.mark.usefixtures("ended")

X, Y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0], [0.0]])


class Model(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        with torch.no_grad():
            self.layer.weight.fill_(0.5)
            self.layer.bias.fill_(0.25)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        out = self.layer(x)
        if y is None:
            return out
        self.calls += 1
        return out, nn.functional.mse_loss(out, y)


class WithLoss(nn.Module):
    """A model in another one, which computes the loss."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.model(x, y)


def training(model: nn.Module, options: Options | None = None) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.05))


def options(replicas: int = 1) -> Options:
    chosen = Options()
    chosen.replicationFactor(replicas)
    chosen.broadcastBuffers(replicas == 1)
    return chosen


def torch_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(X, Y)[1].backward()
    optimizer.step()


class Counting:
    """Counts the calls of an executor's copyWeightsToHost."""

    def __init__(self, executor: poptorch.PoplarExecutor) -> None:
        self.count, self._copy = 0, executor.copyWeightsToHost
        executor.copyWeightsToHost = self

    def __call__(self) -> None:
        self.count += 1
        self._copy()


@pytest.mark.parametrize("nested", [False, True], ids=["same", "nested"])
@pytest.mark.parametrize("first", ["training", "inference"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_inference_follows_the_training_of_its_model(
    replicas: int, first: str, nested: bool
) -> None:
    model, reference = Model(), Model()
    outer = WithLoss(model) if nested else model
    if first == "training":
        train = training(outer, options(replicas))
        infer = poptorch.inferenceModel(model, options(replicas))
    else:
        infer = poptorch.inferenceModel(model, options(replicas))
        infer(X)
        train = training(outer, options(replicas))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    for _ in range(4):
        torch.testing.assert_close(infer(X), reference(X))
        train(X, Y)
        torch_step(reference, optimizer)
    train.destroy()
    torch.testing.assert_close(infer(X), reference(X))


def test_inference_asks_the_training_model_for_its_weights_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Model()
    train, infer = training(model), poptorch.inferenceModel(model)
    counting = Counting(train)
    train(X, Y)
    infer(X)
    counting.count = 0
    for _ in range(1000):
        train(X, Y)
    assert counting.count == 0
    caplog.set_level(logging.DEBUG, logger="poptorch::python")
    infer(X)
    assert counting.count == 1
    assert "Implicit copyWeightsToDevice()" in caplog.text
    caplog.clear()
    infer(X)
    assert counting.count == 1
    assert "Implicit" not in caplog.text
    for copy in (model.state_dict, train.detachFromDevice, train.destroy):
        if train.isAttachedToDevice():
            train(X, Y)
        copy()
    assert counting.count == 3  # the last had nothing to copy


def test_inference_sees_a_copy_to_the_host_that_happened_for_another_reason() -> None:
    model = Model()
    train, infer = training(model), poptorch.inferenceModel(model)
    infer(X)
    train(X, Y)
    weight = model.layer.weight.detach().clone()  # copies
    assert not torch.equal(weight, torch.full((1, 2), 0.5))
    torch.testing.assert_close(infer(X), model(X))
    train(X, Y)
    del train
    gc.collect()
    torch.testing.assert_close(infer(X), model(X))


def test_inference_does_not_see_what_the_user_writes_until_it_is_copied() -> None:
    model = Model()
    train, infer = training(model), poptorch.inferenceModel(model)
    train(X, Y)
    before = infer(X)
    with torch.no_grad():
        model.layer.weight.zero_()
    torch.testing.assert_close(infer(X), before)
    infer.copyWeightsToDevice()
    torch.testing.assert_close(infer(X), model(X))
    other = training(Model())  # copies to another model are no reason to upload
    with torch.no_grad():
        model.layer.weight.fill_(3.0)
    before = infer(X)
    other(X, Y)
    other.copyWeightsToHost()
    torch.testing.assert_close(infer(X), before)


def test_loaded_executables_follow_each_other(tmp_path: Path) -> None:
    model = Model()
    train, infer = training(model), poptorch.inferenceModel(model)
    train.compileAndExport(tmp_path / "train", X, Y, export_model=False)
    infer.compileAndExport(tmp_path / "infer", X, export_model=False)
    train.destroy()
    infer.destroy()
    reference = Model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    train, infer = training(model), poptorch.inferenceModel(model)
    train.loadExecutable(tmp_path / "train")
    infer.loadExecutable(tmp_path / "infer")
    for _ in range(3):
        torch.testing.assert_close(infer(X), reference(X))
        train(X, Y)
        torch_step(reference, optimizer)
    torch.testing.assert_close(infer(X), reference(X))
