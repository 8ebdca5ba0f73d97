"""PoplarExecutor: weights that come when looked at, devices, files, names, times, and errors."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpusim import poptorch
from gpusim.devices import Table, attach
from gpusim.poptorch import ConnectionType, Error, Options, OutputMode
from gpusim.poptorch.executor import context
from gpusim.poptorch.executor.counters import CLOCK, EVENTS

X, Y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0], [0.0]])


class Model(nn.Module):
    """A layer that is normalised, and a weight that is there twice."""

    def __init__(self, normalised: bool = False) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.again = self.scale
        self.norm = nn.BatchNorm1d(1) if normalised else None

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        out = self.lin(x) * self.scale
        if self.norm is not None:
            out = self.norm(out)
        return out if y is None else (out, nn.functional.mse_loss(out, y))


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Devices are free afterwards, whatever a test leaves behind."""
    yield
    for executor in list(context.living):
        executor.destroy()


def training(
    model: nn.Module, options: Options | None = None, lr: float = 0.1
) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=lr))


def message(text: str) -> str:
    return "^" + re.escape(f"'poptorch_py_error': {text}")


MEMBERS = """
    load_state_dict model options getTensorNames getAnchoredTensor copyWeightsToHostIfNeeded
    copyWeightsToHost copyWeightsToDevice copyNamedBuffersToDevice setOptimizer compile
    loadExecutable save rng_state compileAndExport cycleCount compilationTime getPerfCounters
    getHostIpuLatency getComputeLatency getIpuHostLatency getLatency destroy isAttachedToDevice
    isCompiled detachFromDevice attachToDevice __call__
""".split()


def test_an_executor_has_poptorchs_members_and_no_others() -> None:
    own = {name for name in vars(poptorch.PoplarExecutor) if not name.startswith("_")}
    assert own | {"__call__"} == {*MEMBERS, "schedulePlot"}  # the last is gpusim's


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


def test_the_time_of_compilation_needs_a_compilation_and_its_bar() -> None:
    infer = poptorch.inferenceModel(nn.Identity(), Options().showCompilationProgressBar(False))
    with pytest.raises(Error, match="Please set showCompilationProgressBar option to obtain"):
        infer.compilationTime()
    with pytest.raises(Error, match="Please compile the model before obtaining compilation time"):
        poptorch.inferenceModel(nn.Identity()).compilationTime()


# ---------------------------------------------------------------- options and optimizers


def test_options_are_frozen_and_the_executor_keeps_a_clone() -> None:
    options = Options()
    executor = poptorch.inferenceModel(Model(), options)
    assert executor.options is not options
    for frozen in (options, executor.options):
        with pytest.raises(AttributeError, match=r"^Can't modify frozen Options$"):
            frozen.deviceIterations(2)
    assert executor.options.output_mode == OutputMode.All
    assert options.output_mode == OutputMode.Default
    assert training(Model()).options.output_mode == OutputMode.Final


def test_options_of_another_type() -> None:
    with pytest.raises(Error, match=r"Invalid type: 'options' is of type <class 'dict'> \(Expec"):
        poptorch.inferenceModel(Model(), {})  # type: ignore[arg-type]


def test_inference_has_no_optimizer() -> None:
    with pytest.raises(AssertionError, match=r"^Optimizer should be None for inference$"):
        poptorch.PoplarExecutor(
            Model(), None, False, "", optimizer=torch.optim.SGD(Model().parameters(), lr=1.0)
        )


def test_without_an_optimizer_there_is_gradient_descent() -> None:
    model = Model()
    alone = copy.deepcopy(model)
    poptorch.trainingModel(model)(X, Y)
    alone(X, Y)[1].backward()
    wanted = alone.lin.weight.detach() - 0.01 * alone.lin.weight.grad
    torch.testing.assert_close(model.lin.weight.detach(), wanted)


def test_another_learning_rate_counts_from_the_next_call() -> None:
    model = Model()
    train = training(model)
    before = model.lin.weight.detach().clone()
    train.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    train(X, Y)
    assert torch.equal(model.lin.weight, before)
    train.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train(X, Y)
    assert not torch.equal(model.lin.weight, before)


def test_the_strategy_cannot_change_after_compilation() -> None:
    model = Model()
    sgd = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = poptorch.trainingModel(model, None, sgd)
    train(X, Y)
    halved = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, accum_type=torch.float16)
    with pytest.raises(ValueError, match="would require changing options"):
        train.setOptimizer(halved)


def test_an_optimizers_state_survives_destroying_and_loading() -> None:
    model = Model()
    adam = poptorch.optim.Adam(model.parameters(), lr=0.1)
    train = poptorch.trainingModel(model, None, adam)
    train(X, Y)
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(adam.state_dict())
    assert "Accl1___lin.weight" in state["ipu_state"]
    train(X, Y)
    wanted = model.lin.weight.detach().clone()

    other = Model()
    other.load_state_dict(weights)
    again = poptorch.optim.Adam(other.parameters(), lr=0.1)
    again.load_state_dict(state)
    poptorch.trainingModel(other, None, again)(X, Y)
    torch.testing.assert_close(other.lin.weight.detach(), wanted)

    model.load_state_dict(weights)
    adam.load_state_dict(state)
    train.destroy()
    train(X, Y)
    torch.testing.assert_close(model.lin.weight.detach(), wanted)


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (Options().replicationFactor(128), "Too many IPUs requested (128). Experiments that need "
         "more than 64 IPUs require distributed execution."),
        (Options().replicationFactor(3), "The model specifies the use of 3 IPUs, however PopTorch "
         "must reserve a minimum of 4 in order to allow the model to run, because PopTorch must "
         "reserve a power of 2 or a multiple of 64 IPUs. Please reconfigure your model to use a "
         "different number of IPUs or set poptorch.Options().autoRoundNumIPUs(True)."),
        (Options().replicationFactor(2).useIpuId(0), "Expected at least replication factor * used "
         "IPUs = 1 * 2 = 2 device Ids but the user provided 1"),
        (Options().useIpuId(99), "Failed to acquire device Id 99: "),
        (Options().replicationFactor(32), "Failed to acquire 32 IPU(s): there are 16 simulated"),
    ],
    ids=["128", "3", "small", "unknown", "32"],
)  # fmt: skip
def test_devices_that_there_are_not(options: Options, text: str) -> None:
    executor = poptorch.inferenceModel(nn.Identity(), options)
    with pytest.raises(Error, match=message(text)):
        executor(torch.zeros(options.replication_factor))
    assert not executor.isCompiled()


def test_a_number_of_ipus_is_rounded_up_if_asked(caplog: pytest.LogCaptureFixture) -> None:
    options = Options().replicationFactor(3).autoRoundNumIPUs(True)
    assert poptorch.inferenceModel(nn.Identity(), options)(torch.arange(3)).tolist() == [0, 1, 2]
    assert any(text.startswith("Reserving 4 IPUs when the model") for text in caplog.messages)


def test_a_device_is_exclusive() -> None:
    table = Table.from_environment()
    options = Options().useIpuId(3)
    first = poptorch.inferenceModel(nn.Identity(), options)
    first(X)
    assert first.isAttachedToDevice()
    second = poptorch.inferenceModel(nn.Identity(), options)
    with pytest.raises(Error, match=message("Failed to acquire device Id 3: IPU 3 is used by")):
        second(X)
    first.detachFromDevice()
    assert torch.equal(second(X), X)
    with pytest.raises(Error, match=message("Device is not attached")):
        first.detachFromDevice()
    second.destroy()
    first.attachToDevice()
    with pytest.raises(Error, match=message("Device is already attached")):
        first.attachToDevice()
    del first
    gc.collect()
    attach(table.device(3)).detach()  # free, as its owner was collected


@pytest.mark.parametrize("kind", ConnectionType)
def test_when_a_model_attaches(kind: ConnectionType) -> None:
    executor = poptorch.inferenceModel(nn.Identity(), Options().connectionType(kind))
    executor.compile(X)
    assert executor.isCompiled()
    assert executor.isAttachedToDevice() == (kind is ConnectionType.Always)
    if kind is ConnectionType.Never:
        with pytest.raises(AssertionError, match=r"^Trying to run a model on an offline device"):
            executor(X)
        with pytest.raises(AssertionError, match=r"^Trying to attach to an offline device"):
            executor.attachToDevice()
    else:
        executor(X)
        assert executor.isAttachedToDevice()


def test_the_ipu_model_needs_no_device() -> None:
    options = Options().useIpuModel(True).replicationFactor(32)
    executors = [poptorch.inferenceModel(nn.Identity(), options) for _ in range(2)]
    for executor in executors:
        assert len(executor(torch.zeros(32))) == 32 and executor.isAttachedToDevice()


def test_the_end_of_the_program_gives_devices_back() -> None:
    executor = poptorch.inferenceModel(nn.Identity(), Options().useIpuId(2))
    executor(X)
    poptorch.poptorchAtExit()
    attach(Table.from_environment().device(2)).detach()
    assert not executor.isAttachedToDevice()


# ---------------------------------------------------------------- compiling


def test_compiling_twice_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    executor = poptorch.inferenceModel(nn.Identity())
    executor.compile(X)
    assert isinstance(executor.compilationTime(), timedelta)
    executor.compile(X)
    assert "Call to compile() ignored: the executable is already compiled" in caplog.messages


class Terminal(io.StringIO):
    """Standard error as a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("shown", [True, False])
def test_a_bar_shows_how_far_compiling_is(shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    options = Options().showCompilationProgressBar(shown)
    poptorch.inferenceModel(nn.Identity(), options)(X)
    written = sys.stderr.getvalue()  # type: ignore[attr-defined]  # a Terminal
    assert ("Graph compilation:   0%|" in written) == shown
    assert ("Graph compilation: 100%|####################| 4/4 [" in written) == shown


def test_hooks_run_around_compiling() -> None:
    calls: list[str] = []
    handles = [
        poptorch.registerPreCompileHook(lambda: calls.append("pre")),
        poptorch.registerPostCompileHook(lambda: calls.append("post")),
    ]

    def forward(x: Tensor) -> Tensor:
        calls.append("forward")
        return x + 1

    executor = poptorch.inferenceModel(forward)
    for _ in range(2):
        executor(X)
    assert calls == ["pre", "forward", "post"]
    with pytest.raises(RuntimeError, match="no"):
        poptorch.inferenceModel(failing)(X)
    assert calls[3:] == ["pre", "post"]
    for handle in handles:
        handle.remove()
    poptorch.inferenceModel(nn.Identity())(X)
    assert len(calls) == 5


def failing(x: Tensor) -> Tensor:
    raise RuntimeError("no")


@pytest.mark.parametrize("when", ["Pre", "Post"])
def test_a_hook_can_be_called(when: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{when}-compile hook must be callable$"):
        getattr(poptorch, f"register{when}CompileHook")(3)


@pytest.mark.parametrize("execution", ["lockstep", "threads"])
def test_forward_knows_that_it_is_on_an_ipu(execution: str) -> None:
    seen = []

    def forward(x: Tensor) -> Tensor:
        seen.append(poptorch.isRunningOnIpu())
        seen.append(poptorch.poptorch_core.isCompilingWithDispatcher())
        seen.append(poptorch._impl.isDispatchTracing())
        return x + 1

    options = Options().replicationFactor(2)
    options._Popart.set("gpusim.execution", execution)
    poptorch.inferenceModel(forward, options)(X)
    assert all(seen) and seen and not poptorch.isRunningOnIpu()
    assert not poptorch.poptorch_core.isCompilingWithDispatcher()
    assert not poptorch._impl.isDispatchTracing()


def test_no_loss_and_two_losses_are_errors() -> None:
    with pytest.raises(Error, match="Couldn't find a loss in graph"):
        training(nn.Linear(2, 1))(X)
    model = nn.Linear(2, 1)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Any:
            out = self.model(x)
            return nn.functional.mse_loss(out, out * 2), nn.functional.l1_loss(out, out + 1)

    with pytest.raises(Error, match="Multiple independent losses found in graph"):
        training(Two())(X)


def test_attributes_are_the_models() -> None:
    executor = poptorch.inferenceModel(Model())
    assert executor.model.lin is executor.lin and executor.training
    assert repr(executor).startswith("Model(\n  (lin): Linear(")
    with pytest.raises(AttributeError, match="nothing"):
        _ = executor.nothing


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


# ---------------------------------------------------------------- random numbers


def noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def test_random_numbers_are_each_replicas_own_and_go_on() -> None:
    options = Options().randomSeed(3).replicationFactor(2).deviceIterations(2)
    executor = poptorch.inferenceModel(noise, options)
    with pytest.raises(Error, match="Model has not been compiled"):
        _ = executor.rng_state
    first, second = executor(torch.zeros(4)), executor(torch.zeros(4))
    assert len({*first.tolist(), *second.tolist()}) == 8
    assert executor.rng_state == [3, 4, 0]
    executor.rng_state = [3, 2, 0]
    assert torch.equal(executor(torch.zeros(4)), second)
    executor.destroy()
    assert torch.equal(executor(torch.zeros(4)), first)
    with pytest.raises(ValueError, match=r"^rng_state=\[1\]: expected a list of three integers$"):
        executor.rng_state = [1]


# ---------------------------------------------------------------- tensors and times


def test_tensors_are_kept_by_name() -> None:
    options = Options().deviceIterations(4).replicationFactor(2)
    options.anchorTensor("all", "Gradient___lin.weight", OutputMode.All)
    options.anchorTensor("as outputs", "Gradient___lin.weight")
    options.anchorTensor("second", "Gradient___lin.weight", OutputMode.EveryN, 2)
    model = Model()
    train = training(model, options, lr=0.0)
    with pytest.raises(AssertionError, match=r"^Model must be compiled before calling getTensorN"):
        train.getTensorNames()
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    train(x, y)
    names = train.getTensorNames()
    assert {"lin.weight", "Gradient___lin.weight"} <= set(names)
    whole = train.getAnchoredTensor("all")
    assert whole.shape == (8, 2)
    assert torch.equal(train.getAnchoredTensor("as outputs"), whole[6:])
    assert torch.equal(train.getAnchoredTensor("second"), whole[[2, 3, 6, 7]])
    with pytest.raises(AssertionError, match=r"^No tensor with name other found\.$"):
        train.getAnchoredTensor("other")


def test_the_updates_tensors_are_kept_by_name() -> None:
    options = Options().deviceIterations(2).replicationFactor(2)
    options.Training.gradientAccumulation(3)
    for short, name, mode in (
        ("all", "UpdatedVar___lin.weight", OutputMode.All),
        ("sum", "UpdatedVar___model.lin.weight", OutputMode.Sum),
        ("as outputs", "UpdatedVar___lin.weight", None),
        ("rate", "scaledLearningRate0___specific___lin.weight", OutputMode.All),
        ("weight", "lin.weight", OutputMode.All),
        ("gradient", "Gradient___lin.weight", OutputMode.All),
        ("loss", "loss", OutputMode.All),
        ("x", "input", OutputMode.All),
        ("y", "input/1", OutputMode.Final),
    ):
        options.anchorTensor(short, name, mode)
    model = Model()
    start = model.lin.weight.detach().clone()
    train = training(model, options, lr=0.125)
    x, y = torch.randn(12, 2), torch.randn(12, 1)
    out, _ = train(x, y)
    kept = train.getAnchoredTensor
    updated = kept("all").reshape(2, 2, 1, 2)  # iterations, replicas, *shape
    assert torch.equal(updated[0, 0], updated[0, 1]) and torch.equal(updated[1, 0], updated[1, 1])
    gradients = kept("gradient").reshape(2, 6, 1, 2).mean(dim=1)
    expected = torch.stack([start - 0.125 * gradients[0], start - 0.125 * gradients.sum(dim=0)])
    torch.testing.assert_close(updated[:, 0], expected)
    assert torch.equal(kept("weight").reshape(2, 6, 1, 2)[1, 0], updated[0, 0])  # as before it
    assert torch.equal(kept("as outputs"), kept("all")[2:])
    assert torch.equal(kept("sum"), (updated[0] + updated[1]).reshape(2, 2))
    assert kept("as outputs")[0].tolist() == model.lin.weight[0].tolist()
    assert kept("rate").tolist() == [0.125] * 4
    assert sorted(map(tuple, kept("x").tolist())) == sorted(map(tuple, x.tolist()))
    torch.testing.assert_close(kept("loss")[-2:], (out - kept("y")).pow(2).flatten())


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_names_are_those_of_the_graph(tmp_path: Path) -> None:
    def names(executor: poptorch.PoplarExecutor) -> set[str]:
        return set(executor.getTensorNames())

    weighted = Model()
    torch.nn.utils.weight_norm(weighted.lin)
    sgd = torch.optim.SGD(weighted.lin.parameters(), lr=0.1)  # not the scale
    train = poptorch.trainingModel(weighted, Options(), sgd)
    train.compile(X, torch.zeros(len(X), 1))
    found = names(train)
    trained = {"lin.weight_g", "lin.weight_v", "lin.bias"}
    assert {name for name in found if name.startswith("UpdatedVar___")} == {
        f"UpdatedVar___{name}" for name in trained
    }
    assert {*trained, "scale", "Gradient___scale", "input", "input/1", "loss"} <= found
    assert {
        f"{value}___specific___{name}"
        for value in ("scaledLearningRate0", "weightDecayScaleFactor0")
        for name in trained
    } <= found
    assert not any(name.endswith("lin.weight") for name in found)
    train.save(tmp_path / "file", export_model=False)
    train.destroy()
    with pytest.raises(AssertionError, match=r"^Model must be compiled before calling getTensorN"):
        train.getTensorNames()
    train.loadExecutable(tmp_path / "file")
    assert names(train) == found
    infer = poptorch.inferenceModel(Model())
    infer.compile(X)
    assert {"input", "lin.weight"} <= names(infer)
    assert not {"input/1", "loss", "UpdatedVar___lin.weight"} & names(infer)


def test_the_loss_scale_of_automatic_loss_scaling() -> None:
    options = Options().replicationFactor(2).deviceIterations(2)
    options.Training.gradientAccumulation(3).setAutomaticLossScaling(True)
    options.anchorTensor("scale", "finalLossScale", OutputMode.All)
    model = Model()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.125, loss_scaling=4.0)
    train = poptorch.trainingModel(model, options, optimizer)
    x, y = torch.randn(12, 2), torch.randn(12, 1)
    train.compile(x, y)
    for _ in range(2):
        before = optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"]
        train(x, y)
        scale = 4 * float(before)  # the factor doubles in every iteration while gradients fit
        assert train.getAnchoredTensor("scale").tolist() == [scale, scale, 2 * scale, 2 * scale]
        assert optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"] == 4 * before
    assert "finalLossScale" in train.getTensorNames()
    options = Options().anchorTensor("scale", "finalLossScale")
    with pytest.raises(Error, match="Anchored tensor 'finalLossScale' is none of the model's"):
        training(Model(), options)(x, y)


@pytest.mark.parametrize("factor", [1.0, 16.0])
def test_a_loaded_factor_of_the_loss_scale_leaves_the_weights_as_they_would_be(
    factor: float,
) -> None:
    options = Options().anchorTensor("scale", "finalLossScale")
    options.Training.setAutomaticLossScaling(True)
    model = Model()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.125)
    train = poptorch.trainingModel(model, options, optimizer)
    plain = copy.deepcopy(model)
    expected = training(plain, lr=0.125)
    x, y = torch.randn(2, 2), torch.randn(2, 1)
    for step in range(3):
        if step == 1:
            state = copy.deepcopy(optimizer.state_dict())
            state["ipu_state"]["lossScaleUpdateFactor"].fill_(factor)
            optimizer.load_state_dict(state)
        train(x, y)
        expected(x, y)
        assert train.getAnchoredTensor("scale") == [1, factor, 2 * factor][step]
        torch.testing.assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", ["UpdatedVar___lin", "lossScaling_FLOAT", "x___specific___y"])
def test_tensors_of_updates_that_there_are_not(name: str) -> None:
    options = Options().anchorTensor("a", name)
    with pytest.raises(Error, match=f"Anchored tensor '{name}' is none of the model's: Updated"):
        training(Model(), options)(X, torch.zeros(len(X), 1))
    with pytest.raises(Error, match=f"Anchored tensor '{name}' is none of the model's"):
        poptorch.inferenceModel(Model(), Options().anchorTensor("a", name))(X)


def test_values_of_a_parameter_that_leaves_the_optimizer() -> None:
    name = "scaledLearningRate0___specific___scale"
    options = Options().anchorTensor("updated", "UpdatedVar___scale").anchorTensor("rate", name)
    model = Model()
    train = training(model, options, lr=0.125)
    train(X[:1], Y[:1])
    assert train.getAnchoredTensor("rate").item() == 0.125
    assert torch.equal(train.getAnchoredTensor("updated"), model.scale.detach())
    train.setOptimizer(torch.optim.SGD(model.lin.parameters(), lr=0.125))
    with pytest.raises(Error, match=f"Anchored tensor '{name}' is none of the model's: scaledL"):
        train(X[:1], Y[:1])


@pytest.mark.parametrize(("iterations", "returned"), [(1, 0), (3, 0), (6, 1), (8, 2)])
def test_the_period_of_an_anchor_need_not_divide_the_iterations(
    iterations: int, returned: int
) -> None:
    options = Options().deviceIterations(iterations).replicationFactor(2)
    for name in ("Gradient___lin.weight", "UpdatedVar___lin.weight", "loss"):
        options.anchorTensor(name, name, OutputMode.EveryN, 4)
        options.anchorTensor(f"all {name}", name, OutputMode.All)
    train = training(Model(), options)
    train(torch.randn(2 * iterations, 2), torch.randn(2 * iterations, 1))
    for name in ("Gradient___lin.weight", "UpdatedVar___lin.weight", "loss"):
        whole = train.getAnchoredTensor(f"all {name}").reshape(iterations, 2, -1)
        found = train.getAnchoredTensor(name)
        assert found.shape == ((2 * returned,) if name == "loss" else (2 * returned, 2))
        assert torch.equal(found.reshape(returned, 2, whole.shape[-1]), whole[3::4])


def test_anchors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "poptorch::python")
    options = Options().deviceIterations(4)
    options.anchorTensor("all", "Gradient___lin.bias", OutputMode.All)
    options.anchorTensor("fourth", "lin.bias", OutputMode.EveryN, 4)
    options.anchorTensor("as outputs", "UpdatedVar___lin.bias")
    options.anchorTensor("sum", "loss", OutputMode.Sum)
    options.anchorTensor("default", "loss", OutputMode.Default)
    training(Model(), options).compile(torch.zeros(4, 2), torch.zeros(4, 1))
    assert [text for text in caplog.messages if text.startswith(" anchor")] == [
        " anchor ( Gradient___lin.bias ALL/1 )",
        " anchor ( lin.bias EVERYN/4 )",
        " anchor ( UpdatedVar___lin.bias FINAL/1 )",
        " anchor ( loss Sum/1 )",
        " anchor ( loss Default/1 )",
    ]


def test_a_tensor_that_there_is_not() -> None:
    options = Options().anchorTensor("a", "nothing")
    with pytest.raises(Error, match="Anchored tensor 'nothing' is none of the model's"):
        poptorch.inferenceModel(Model(), options)(X)


@pytest.mark.parametrize(
    ("mode", "returned"), [(OutputMode.All, 12), (OutputMode.Final, 2), (OutputMode.Sum, 2)]
)
def test_times_are_measured(mode: OutputMode, returned: int) -> None:
    options = Options().replicationFactor(2).deviceIterations(3).outputMode(mode)
    options.Training.gradientAccumulation(2)
    train = training(Model(), options)
    assert train.getPerfCounters() == {event: [[]] for event in EVENTS}
    assert train.getLatency() == (0.0, 0.0, 0.0)
    train(torch.zeros(12, 2), torch.zeros(12, 1))
    times = train.getPerfCounters()
    assert [[len(one) for one in times[event]] for event in times] == [
        [12, 12], [12, 12], [returned, returned], [returned, returned]
    ]  # fmt: skip
    for one in (*times["input"], *times["output_complete"]):
        assert one == sorted(one) and one[0] > 0
    latencies = (
        train.getHostIpuLatency(), train.getComputeLatency(), train.getIpuHostLatency(),
        train.getLatency(),
    )  # fmt: skip
    for least, most, mean in latencies:
        assert 0 <= least <= mean <= most
    assert latencies[3][1] >= latencies[1][0] > 0


def test_synthetic_data_is_made_and_not_timed() -> None:
    executor = poptorch.inferenceModel(nn.Identity(), Options().enableSyntheticData(True))
    x = torch.zeros(1000)
    made = executor(x)
    assert abs(made.mean()) < 0.2 and abs(made.std() - 1) < 0.2 and not x.any()
    assert executor.getPerfCounters()["input"] == [[]]
    assert executor.getLatency() == (0.0, 0.0, 0.0)


def test_synthetic_data_has_an_empty_list_for_each_input_and_output() -> None:
    options = Options().enableSyntheticData(True).replicationFactor(2).deviceIterations(3)
    executor = poptorch.inferenceModel(lambda x, y: (x, y, x + y), options)
    executor(torch.zeros(6), torch.zeros(6))
    counters = executor.getPerfCounters()
    assert [counters[event] for event in EVENTS] == [[[]] * 2, [[]] * 2, [[]] * 3, [[]] * 3]
    assert executor.getComputeLatency() == (0.0, 0.0, 0.0)


def test_cycles_are_estimated_from_the_measured_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "poptorch::python")
    executor = poptorch.inferenceModel(nn.Identity())
    executor(X)
    with pytest.raises(Error, match=r"Cycle count logging is disabled\. Please set option"):
        executor.cycleCount()
    executor = poptorch.inferenceModel(nn.Identity(), Options().logCycleCount(True))
    with pytest.raises(Error, match="Please run the model at least once before obtaining cycle"):
        executor.cycleCount()
    executor(X)
    assert executor.cycleCount() == round(executor._counters.device_seconds * CLOCK) > 0
    assert f"Total number of IPU cycles: {executor.cycleCount()}" in caplog.messages
    options = Options().logCycleCount(True).useIpuModel(True)
    with pytest.raises(Error, match="Cycle count logging is only supported on actual IPU"):
        poptorch.inferenceModel(nn.Identity(), options)(X)


def test_infinities_and_nans_are_an_error_if_asked() -> None:
    options = Options()
    options.Precision.enableFloatingPointExceptions(True)
    executor = poptorch.inferenceModel(lambda x: 1 / x, options)
    assert executor(torch.ones(2)).tolist() == [1, 1]
    with pytest.raises(Error, match="floating-point exception: output 0 has infinities"):
        executor(torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize("execution", ["lockstep", "threads"])
@pytest.mark.parametrize("compare", [torch.gt, torch.le, lambda x, y: x < y, Tensor.ge_])
def test_a_comparison_of_nans_is_an_error_if_asked(execution: str, compare: Any) -> None:
    options = Options().replicationFactor(2)
    options._Popart.set("gpusim.execution", execution)
    options.Precision.enableFloatingPointExceptions(True)
    executor = poptorch.inferenceModel(lambda x, y: compare(x * 1, 2 * y), options)
    x = torch.tensor([1.0, 3.0])
    assert torch.equal(executor(x, X[0]), compare(x.clone(), 2 * X[0]))
    with pytest.raises(Error, match="floating-point exception: comparison 0 compares NaNs"):
        executor(x, torch.tensor([1.0, float("nan")]))
    unchecked = poptorch.inferenceModel(compare)
    unchecked(x, torch.tensor([1.0, float("nan")]))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_torchs_modes_do_not_matter(mode: Any) -> None:
    model = Model()
    with mode():
        train = training(model, lr=0.01)
        first = train(X, Y)[1]
        train(X, Y)
    assert train(X, Y)[1] < first
    assert model.lin.weight.requires_grad and model(X).requires_grad


# ---------------------------------------------------------------- profiling and testing


def test_tracepoints_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "poptorch::python")
    channel = poptorch.profiling.Channel("App")
    with pytest.raises(ValueError, match="no"), channel.tracepoint("block"):
        raise ValueError("no")

    class Thing:
        def method(self, x: int) -> int:
            return x + 1

    thing = Thing()
    channel.instrument(thing, "method")
    assert thing.method(1) == 2
    with pytest.raises(AttributeError):
        channel.instrument(thing, "missing")
    found = [re.sub(r"\d\.\d+", "T", text) for text in caplog.messages]
    assert found == ["[App] block took T s", "[App] method took T s"]


@pytest.mark.parametrize(
    ("ref", "other", "close"),
    [
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), torch.ones(2) * 1.001, False),
        (torch.ones(2).half(), torch.ones(2) * 1.001, True),
        ((X, [Y]), (X, [Y]), True),
        ((X, [Y]), (X, (Y,)), False),
        ((X,), (X, Y), False),
        ({"a": X}, {"a": X}, True),
        ({"a": X}, {"b": X}, False),
        ((X, 1), (X, 2), False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
    ],
)
def test_what_is_close(ref: Any, other: Any, close: bool) -> None:
    assert poptorch.testing.allclose(ref, other) is close
