"""PoplarExecutor: members, options, optimizers, devices, compiling, and errors."""

from __future__ import annotations

import copy
import gc
import io
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpusim import poptorch
from gpusim.devices import Table, attach
from gpusim.poptorch import ConnectionType, Error, Options, OutputMode
from tests.poptorch.executor_models import Model, X, Y, message, training

pytestmark = pytest.mark.usefixtures("ended")


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
        poptorch.inferenceModel(Model(), {})


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
    written = sys.stderr.getvalue()
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
