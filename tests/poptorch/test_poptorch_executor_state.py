"""PoplarExecutor: weights that come when looked at, buffers that change, and files."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpusim import poptorch
from gpusim.devices import Table, attach
from gpusim.poptorch import ConnectionType, Error, Options
from tests.poptorch.executor_models import Model, X, Y, message, training

pytestmark = pytest.mark.usefixtures("ended")

# ---------------------------------------------------------------- weights


def test_weights_come_when_they_are_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "poptorch::python")
    model = Model()
    before = model.lin.weight.detach().clone()
    weight = model.lin.weight
    train = training(model)
    looks: list[Any] = [
        lambda: model.lin.weight.tolist(),
        lambda: torch.equal(weight, before),
        lambda: weight + 0,
        lambda: model.state_dict(),
        lambda: list(model.parameters()),
        lambda: model.lin.bias.data,
        lambda: model(X),
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model),
        lambda: train.lin.weight.sum(),
    ]
    for look in looks:
        train(X, Y)
        assert "Implicit copyWeightsToHost()" not in caplog.messages
        look()
        assert caplog.messages.count("Implicit copyWeightsToHost()") == 1
        look()
        assert caplog.messages.count("Implicit copyWeightsToHost()") == 1
        assert not model.copyWeightsToHostIfNeeded()
        caplog.clear()
    assert not torch.equal(weight, before)


def test_classes_change_in_place_and_come_back() -> None:
    model = Model(normalised=True)
    weight, mean = model.lin.weight, model.norm.running_mean
    train = training(model)
    assert isinstance(model, Model) and type(model).__name__ == "PoptorchModel"
    assert model.lin.weight is weight and isinstance(weight, nn.Parameter)
    assert type(weight).__name__ == "PoptorchParameter"
    assert type(mean).__name__ == "PoptorchBuffer" and isinstance(mean, Tensor)
    train(X, Y)
    train.destroy()
    assert type(model) is Model and type(weight) is nn.Parameter and type(mean) is Tensor
    assert model.again is model.scale


def test_what_is_saved_is_of_the_original_classes(tmp_path: Path) -> None:
    model = Model(normalised=True)
    train = training(model)
    train(X, Y)
    state = model.state_dict()
    assert {type(value) for value in state.values()} == {Tensor}
    kept = model.state_dict(keep_vars=True)
    assert type(kept["lin.weight"]) is nn.Parameter and kept["again"] is kept["scale"]
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is Model and other.again is other.scale
        assert type(other.lin.weight) is nn.Parameter
        assert type(other.norm.running_mean) is Tensor
        assert torch.equal(other.lin.weight, model.lin.weight)
    torch.save(state, tmp_path / "state.pt")
    Model(normalised=True).load_state_dict(torch.load(tmp_path / "state.pt"))


def test_a_model_is_wrapped_once() -> None:
    model = Model()
    train = training(model)
    with pytest.raises(RuntimeError, match=r"^Model has already been wrapped in 'poptorch\.train"):
        training(model)
    model.destroy()
    train = training(model)
    train.destroy()


def test_weights_survive_their_executor() -> None:
    model = Model()
    before = model.lin.weight.detach().clone()
    train = training(model)
    train(X, Y)
    del train
    gc.collect()
    assert not torch.equal(model.lin.weight, before)
    attach(Table.from_environment().device(0)).detach()
    model.destroy()
    assert type(model) is Model and type(model.lin.weight) is nn.Parameter


def test_a_destroyed_model_can_be_called_again() -> None:
    model = Model()
    train = training(model)
    train(X, Y)
    train.destroy()
    before = model.lin.weight.detach().clone()
    train(X[:1], Y[:1])
    assert not torch.equal(model.lin.weight, before) and train.isCompiled()


def test_inference_made_of_a_training_model_has_its_weights() -> None:
    model = Model()
    train = training(model)
    infer = poptorch.inferenceModel(train)
    train(X, Y)
    first = infer(X)
    torch.testing.assert_close(first, model(X).detach())
    train(X, Y)
    torch.testing.assert_close(infer(X), model(X).detach())
    assert not torch.equal(infer(X), first)


def test_detaching_and_attaching_brings_new_weights() -> None:
    model = Model()
    infer = poptorch.inferenceModel(model)
    infer(X)
    with torch.no_grad():
        model.lin.weight.zero_()
    infer.detachFromDevice()
    infer.attachToDevice()
    assert torch.equal(infer(X)[0], infer(X)[1])


def test_weights_of_the_host_replace_the_devices() -> None:
    model = Model()
    train = training(model, lr=0.0)
    state = {name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()}
    train(X, Y)
    assert train.load_state_dict(state).missing_keys == []
    out, _ = train(X, Y)
    assert out.flatten().tolist() == [(2 + 4 + 2) * 2, (6 + 8 + 2) * 2]


def test_weights_of_64_bits_are_32_bits_on_the_device() -> None:
    model = Model().double()
    train = training(model)
    seen, _ = train(X, Y)
    assert seen.dtype == torch.float32 and model.lin.weight.dtype == torch.float64
    assert torch.equal(model.lin.weight.float().double(), model.lin.weight)


@pytest.mark.parametrize("what", ["copyWeightsToHost", "copyWeightsToDevice", "attachToDevice",
                                  "detachFromDevice",
                                  "copyNamedBuffersToDevice"])  # fmt: skip
def test_what_needs_a_compiled_model(what: str) -> None:
    executor = poptorch.inferenceModel(Model())
    with pytest.raises(Error, match=message("Model has not been compiled or has been destroyed.")):
        getattr(executor, what)()


# ---------------------------------------------------------------- buffers


class Counting(nn.Module):
    """A buffer that counts, and one that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("offset", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += x.sum()
        return self.count + self.offset


def test_buffers_that_change_need_replicas_that_may_differ() -> None:
    message = "PopTorch does not support broadcasting buffers. If your model is able to tolerate"
    with pytest.raises(Error, match=message):
        poptorch.inferenceModel(Counting(), Options().replicationFactor(2))(torch.ones(2))
    options = Options().replicationFactor(2).deviceIterations(3).broadcastBuffers(False)
    model = Counting()
    infer = poptorch.inferenceModel(model, options)
    assert infer(torch.arange(6.0)).tolist() == [0, 1, 2, 4, 6, 9]
    infer.copyWeightsToHost()
    assert model.count.item() == 6  # the first replica's
    assert infer(torch.zeros(6)).tolist() == [6, 9, 6, 9, 6, 9]


def test_one_replica_may_change_its_buffers() -> None:
    model = Model(normalised=True)
    train = training(model)
    train(X, Y)
    alone = Model(normalised=True)
    alone.load_state_dict(model.state_dict())
    assert model.norm.num_batches_tracked.item() == 1
    assert model.norm.running_mean.item() != 0


def test_named_buffers_are_copied_to_the_device() -> None:
    model = Counting()
    options = Options().updatableNamedBuffers(["offset"])
    infer = poptorch.inferenceModel(model, options)
    assert infer(torch.ones(1)).item() == 1
    model.count.fill_(100)
    model.offset.fill_(50)
    infer.copyNamedBuffersToDevice()
    assert infer(torch.ones(1)).item() == 52
    other = poptorch.inferenceModel(model)
    other(torch.ones(1))
    with pytest.raises(Error, match=message("No named buffers marked as updatable via")):
        other.copyNamedBuffersToDevice()


class Reassigning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.state + x
        return self.state


def test_reassigning_in_forward_is_an_error() -> None:
    model = Reassigning()
    before = model.state
    with pytest.raises(
        Error, match=r"Buffer state is reassigned within .* using self.state.copy_\(src\) to"
    ):
        poptorch.inferenceModel(model)(torch.ones(1))
    assert model.state is before


class Removing(Reassigning):
    def forward(self, x: Tensor) -> Tensor:
        del self.state
        return x * 1


def test_deleting_in_forward_is_an_error() -> None:
    model = Removing()
    with pytest.raises(Error, match="Buffer state is removed from the model when calling the fo"):
        poptorch.inferenceModel(model)(torch.ones(1))
    assert model.state.tolist() == [0]


def test_updatable_buffers_are_checked_when_the_model_is_compiled() -> None:
    infer = poptorch.inferenceModel(Counting(), Options().updatableNamedBuffers(["missing"]))
    with pytest.raises(Error, match="Invalid updatable buffer missing"):
        infer.compile(torch.ones(1))


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("folder", [False, True])
def test_a_training_model_goes_on_from_a_file(tmp_path: Path, folder: bool) -> None:
    model = Model()
    adam = poptorch.optim.Adam(model.parameters(), lr=0.1)
    train = poptorch.trainingModel(model, Options().replicationFactor(2), adam)
    train(X, Y)
    path = tmp_path / "new" / "saved"
    if folder:
        path.mkdir(parents=True)
    train.save(str(path))
    train(X, Y)
    wanted = model.lin.weight.detach().clone()
    train.destroy()
    file = path / "model.poptorch" if folder else path
    loaded = poptorch.load(str(file), lambda options: options.useIpuId(8 + 8))
    assert type(loaded.model).__name__ == "PoptorchModel" and loaded.isCompiled()
    assert loaded.options.replication_factor == 2 and loaded.options.ipu_id == 16
    loaded(X, Y)
    torch.testing.assert_close(loaded.model.lin.weight.detach(), wanted)


def test_an_inference_model_goes_on_from_a_file(tmp_path: Path) -> None:
    model = Model()
    infer = poptorch.inferenceModel(model, Options().connectionType(ConnectionType.OnDemand))
    infer.compileAndExport(tmp_path / "model", X)
    loaded = poptorch.load(tmp_path / "model")
    torch.testing.assert_close(loaded(X), model(X).detach())
    with pytest.raises(Error, match="Shape mismatch for x"):
        loaded(X[:1])


def test_a_file_without_a_model_is_for_a_model_that_is_there(tmp_path: Path) -> None:
    poptorch.inferenceModel(Model()).compileAndExport(tmp_path / "f", X, export_model=False)
    with pytest.raises(AssertionError, match="is a valid PopTorch file but was created with 'exp"):
        poptorch.load(tmp_path / "f")
    gc.collect()
    executor = poptorch.inferenceModel(Model())
    executor.loadExecutable(tmp_path / "f")
    assert executor.isCompiled() and executor(X).shape == (2, 1)


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad"
    bad.write_bytes(b"nonsense")
    with pytest.raises(AssertionError, match=r"^Invalid file .*bad: it does not begin as"):
        poptorch.load(bad)
    with pytest.raises(Error, match=r"Invalid file .*bad: it does not begin as PopTorch files do"):
        poptorch.inferenceModel(Model()).loadExecutable(bad)
    executor = poptorch.inferenceModel(Model())
    with pytest.raises(Error, match="Model has not been compiled"):
        executor.save(bad)
    executor._version = "2.0"
    executor.compileAndExport(bad, X)
    with pytest.raises(AssertionError, match=r"File was created with version: 2\.0 and"):
        poptorch.load(bad)
    with pytest.raises(AssertionError, match="is not a directory"):
        executor.save(bad / "below")
