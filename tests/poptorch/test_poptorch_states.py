"""Executors that train and infer one module, in random order, against plain PyTorch.

The reference keeps the weights of the host, of the training device and of the inference device
apart, and counts the copies to the host.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn

from gpusim import poptorch
from gpusim.poptorch import ConnectionType, Error, Options, OutputMode
from tests.oracles.budget import SEED, budget

State = dict[str, Tensor]
CACHE = tempfile.TemporaryDirectory()  # of traces: a sequence compiles many times
LR = 0.1


class Model(nn.Module):
    """A line, and a buffer that counts its training steps."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -0.5]))
        self.b = nn.Parameter(torch.tensor([0.25]))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        out = (x * self.w).sum(1) + self.b
        if y is None:
            return out * 1.5 + self.steps
        self.steps += 1
        return out, nn.functional.mse_loss(out, y)


class Wrapper(nn.Module):
    """The module inside another one, which trains it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.model(x, y)


X = torch.tensor([[0.5, -1.0], [1.0, 0.75], [-0.25, 0.5], [1.0, 1.0]])
Y = torch.tensor([0.5, -0.25, 1.0, 0.0])


def state_of(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


class Device:
    """The reference of an executor's device."""

    def __init__(self) -> None:
        self.compiled = self.attached = self.first = False
        self.weights: State = {}
        self.id: int | None = None  # of the device that it was attached to first
        self.synchronized = 0  # the number of copies to the host at the last copy of these


class Executors(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self._files = tempfile.TemporaryDirectory()
        self.path = Path(self._files.name) / "saved"
        self.train: Any = None
        self.infer: Any = None

    @initialize(
        nested=st.booleans(), replicas=st.sampled_from([1, 2]), on_demand=st.booleans(),
        first=st.sampled_from(["train", "infer"]),
    )  # fmt: skip
    def begin(self, nested: bool, replicas: int, on_demand: bool, first: str) -> None:
        options = Options().replicationFactor(replicas).broadcastBuffers(replicas == 1)
        options.outputMode(OutputMode.All).enableExecutableCaching(CACHE.name)
        if on_demand:
            options.connectionType(ConnectionType.OnDemand)
        self.options: Options = pickle.loads(pickle.dumps(options))
        assert repr(self.options) == repr(options)
        self.nested, self.first = nested, first
        self.make(Model())

    def make(self, model: Model) -> None:
        """Executors of a model, whose weights are the reference's host's from here on."""
        self.model: Any = model
        self.host = state_of(model)
        self.copies = 0
        self.outdated = False  # whether the training device has newer weights than the host
        self.devices = {"train": Device(), "infer": Device()}
        for which in ("train", "infer") if self.first == "train" else ("infer", "train"):
            if which == "train":
                outer = Wrapper(model) if self.nested else model
                sgd = torch.optim.SGD(model.parameters(), lr=LR)
                self.train = poptorch.trainingModel(outer, self.options.clone(), sgd)
            else:
                self.infer = poptorch.inferenceModel(model, self.options.clone())

    # ---------------------------------------------------------------- the reference

    def executor(self, which: str) -> Any:
        return self.train if which == "train" else self.infer

    def fetch(self) -> None:
        """Newer weights come to the host."""
        if self.outdated:
            self.outdated = False
            self.download("train")

    def download(self, which: str) -> None:
        device = self.devices[which]
        self.host = dict(device.weights)
        self.copies += 1
        device.synchronized = self.copies

    def upload(self, which: str) -> None:
        self.fetch()
        device = self.devices[which]
        device.weights, device.first = dict(self.host), False
        device.synchronized = self.copies

    def compile_reference(self, which: str) -> None:
        device = self.devices[which]
        self.upload(which)
        device.compiled = device.first = True
        if self.options.connection_type == ConnectionType.Always:
            assert self.acquire(which)

    def acquire(self, which: str) -> bool:
        """Attach to the device from before, or the first that is free; whether that worked."""
        device = self.devices[which]
        other = self.devices["infer" if which == "train" else "train"]
        taken = other.id if other.attached else None
        if device.id is None:
            device.id = 1 if taken == 0 else 0
        device.attached = device.id != taken
        return device.attached

    def before_run(self, which: str) -> bool:
        """What happens before a model runs; False if it cannot run without a device."""
        device = self.devices[which]
        if not device.compiled:
            self.compile_reference(which)
            device.first = False
        if not device.attached:
            if not self.acquire(which):
                return False
            self.upload(which)
        elif device.first:
            self.upload(which)
        elif which == "infer":
            self.fetch()
            if device.synchronized < self.copies:
                self.upload(which)
        return True

    def module(self, which: str) -> Model:
        """Plain PyTorch's module with a device's weights."""
        module = Model()
        module.load_state_dict(self.devices[which].weights)
        return module

    # ---------------------------------------------------------------- calls

    @rule(steps=st.lists(st.sampled_from(["train", "infer"]), min_size=1, max_size=4))
    def run(self, steps: list[str]) -> None:
        for which in steps:
            (self.train_step if which == "train" else self.infer_step)()

    def train_step(self) -> None:
        if not self.before_run("train"):
            with pytest.raises(Error, match="Failed to acquire device"):
                self.train(X, Y)
            return
        module = self.module("train")
        replicas = int(self.options.replication_factor)
        parts = zip(X.chunk(replicas), Y.chunk(replicas), strict=True)
        sgd = torch.optim.SGD(module.parameters(), lr=LR)
        loss = sum(module(x, y)[1] / replicas for x, y in parts)
        loss.backward()
        sgd.step()
        with torch.no_grad():
            module.steps -= replicas - 1  # each replica has counted its own
        self.train(X, Y)
        self.devices["train"].weights = state_of(module)
        self.outdated = True

    def infer_step(self) -> None:
        if not self.before_run("infer"):
            with pytest.raises(Error, match="Failed to acquire device"):
                self.infer(X)
            return
        torch.testing.assert_close(self.infer(X), self.module("infer")(X).detach())

    @rule(which=st.sampled_from(["train", "infer"]))
    def compile(self, which: str) -> None:
        if not self.devices[which].compiled:
            self.compile_reference(which)
        self.executor(which).compile(*((X, Y) if which == "train" else (X,)))

    # ---------------------------------------------------------------- devices

    @rule(which=st.sampled_from(["train", "infer"]))
    def detach(self, which: str) -> None:
        device = self.devices[which]
        if not device.compiled or not device.attached:
            with pytest.raises(Error):
                self.executor(which).detachFromDevice()
            return
        self.executor(which).detachFromDevice()
        if which == "train":
            self.fetch()
        device.attached = False

    @rule(which=st.sampled_from(["train", "infer"]))
    def attach(self, which: str) -> None:
        device = self.devices[which]
        if not device.compiled or device.attached or not self.acquire(which):
            with pytest.raises(Error):
                self.executor(which).attachToDevice()
            return
        self.executor(which).attachToDevice()
        self.upload(which)

    @rule(which=st.sampled_from(["train", "infer"]))
    def destroy(self, which: str) -> None:
        self.executor(which).destroy()
        if which == "train":
            self.fetch()
        self.devices[which] = Device()

    # ---------------------------------------------------------------- weights

    @rule(which=st.sampled_from(["train", "infer"]))
    def copy_to_host(self, which: str) -> None:
        if not self.devices[which].compiled:
            with pytest.raises(Error):
                self.executor(which).copyWeightsToHost()
            return
        self.executor(which).copyWeightsToHost()
        if which == "train":
            self.outdated = False
        self.fetch()
        self.download(which)

    @rule(which=st.sampled_from(["train", "infer"]))
    def copy_to_device(self, which: str) -> None:
        if not self.devices[which].compiled:
            with pytest.raises(Error):
                self.executor(which).copyWeightsToDevice()
            return
        self.executor(which).copyWeightsToDevice()
        if which == "train":
            self.outdated = False  # the host's are taken, whatever was trained
        self.upload(which)

    @rule(value=st.integers(-4, 4), how=st.sampled_from(["no_grad", "data", "state"]))
    def change_on_the_host(self, value: int, how: str) -> None:
        self.fetch()
        new = torch.tensor([value / 4, 0.5])
        self.host["w"] = new
        if how == "no_grad":
            with torch.no_grad():
                self.model.w.copy_(new)
        elif how == "data":
            self.model.w.data = new.clone()
        else:
            self.model.load_state_dict(self.host)

    @rule(which=st.sampled_from(["train", "infer"]), value=st.integers(-4, 4))
    def load_state(self, which: str, value: int) -> None:
        self.fetch()
        self.host["b"] = torch.tensor([value / 4])
        state = dict(self.host)
        if which == "train" and self.nested:
            state = {f"model.{name}": x for name, x in state.items()}
        self.executor(which).load_state_dict(state)
        if self.devices[which].compiled and self.devices[which].attached:
            self.upload(which)

    # ---------------------------------------------------------------- files and copies

    @precondition(lambda self: self.devices["train"].compiled)
    @rule()
    def save_and_load(self) -> None:
        """Go on with what a file of the training model holds."""
        self.fetch()
        self.train.save(self.path)
        self.train.destroy()
        self.infer.destroy()
        host = self.host
        loaded = poptorch.load(self.path)
        model: Any = loaded.model.model if self.nested else loaded.model
        self.model, self.train = model, loaded
        self.host, self.copies, self.outdated = host, 0, False
        self.devices = {"train": Device(), "infer": Device()}
        self.compile_reference("train")
        self.infer = poptorch.inferenceModel(model, self.options.clone())

    @precondition(lambda self: self.devices["infer"].compiled)
    @rule()
    def save_and_load_inference(self) -> None:
        self.fetch()
        self.infer.save(self.path)
        loaded = poptorch.load(self.path)
        module = Model()
        module.load_state_dict(self.host)
        torch.testing.assert_close(loaded(X), module(X).detach())
        loaded.destroy()

    @rule(which=st.sampled_from(["train", "infer"]))
    def load_executable(self, which: str) -> None:
        if not self.devices[which].compiled:
            self.compile(which)
        self.executor(which).save(self.path, export_model=False)
        self.executor(which).loadExecutable(self.path)
        self.fetch()
        self.devices[which] = Device()
        self.compile_reference(which)

    @rule(how=st.sampled_from([copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]))
    def copy_the_model(self, how: Any) -> None:
        self.fetch()
        copied = how(self.model)
        assert type(copied) is Model
        for name, value in copied.state_dict().items():
            torch.testing.assert_close(value, self.host[name])
        if how is not copy.copy:
            assert type(copied.w) is nn.Parameter
            torch.testing.assert_close(copied(X), self.plain_host()(X))

    def plain_host(self) -> Model:
        module = Model()
        module.load_state_dict(self.host)
        return module

    # ---------------------------------------------------------------- what can be looked at

    @rule()
    def look(self) -> None:
        self.fetch()
        for name, value in state_of(self.model).items():
            torch.testing.assert_close(value, self.host[name])
        torch.testing.assert_close(self.model(X).detach(), self.plain_host()(X).detach())

    @invariant()
    def states_are_known(self) -> None:
        if self.train is None:
            return
        for which, device in self.devices.items():
            assert self.executor(which).isCompiled() is device.compiled
            assert self.executor(which).isAttachedToDevice() is device.attached

    def teardown(self) -> None:
        for executor in (self.train, self.infer):
            if executor is not None:
                executor.destroy()
        self._files.cleanup()


# In parts, which run beside one another.
@pytest.mark.parametrize("part", range(budget(20)))
def test_executors_in_any_order(part: int) -> None:
    machine: Any = seed(SEED + part)(type("Executors", (Executors,), {}))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=budget(100),
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
