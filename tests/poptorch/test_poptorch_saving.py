"""Files of compiled models: what they bring back."""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from gpusim import poptorch
from gpusim.poptorch import (
    CommGroupType,
    ConnectionType,
    Options,
    VariableRetrievalMode,
)
from gpusim.poptorch.blocks import BeginBlock
from tests.poptorch.saved import Line, Model, X

Y = torch.tensor([0, 1] * 4)


pytestmark = pytest.mark.usefixtures("ended")


def weights(executor: poptorch.PoplarExecutor) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in executor.model.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


# ---------------------------------------------------------------- going on


def options_of(**how: Any) -> Options:
    options = Options().replicationFactor(2).deviceIterations(2).randomSeed(7)
    options.Training.gradientAccumulation(2)
    options.broadcastBuffers(False)
    options.Precision.enableStochasticRounding(how.get("stochastic", False))
    if how.get("automatic"):
        options.Training.setAutomaticLossScaling(True)
    if how.get("on_demand"):
        options.connectionType(poptorch.ConnectionType.OnDemand)
    return options


def adam(parameters: Any) -> Any:
    return poptorch.optim.AdamW(parameters, lr=0.1)


def half_adam(parameters: Any) -> Any:
    return poptorch.optim.Adam(parameters, lr=0.1, accum_type=torch.float16)


CASES: dict[str, tuple[Callable[[Any], Any], dict[str, Any], torch.dtype]] = {
    "adam": (adam, {}, torch.float32),
    "torch's adam": (lambda p: torch.optim.Adam(p, lr=0.1), {}, torch.float32),
    "torch's sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {}, torch.float32),
    "lamb": (lambda p: poptorch.optim.LAMB(p, lr=0.1), {}, torch.float32),
    "stochastic": (half_adam, {"stochastic": True}, torch.float16),
    "automatic": (adam, {"automatic": True}, torch.float32),
    "float64": (adam, {}, torch.float64),
    "bfloat16": (adam, {}, torch.bfloat16),
    "on demand": (adam, {"on_demand": True}, torch.bfloat16),
}


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_with_the_same_bits(tmp_path: Path, case: str) -> None:
    make, how, dtype = CASES[case]
    model = Model().to(dtype)
    train = poptorch.trainingModel(model, options_of(**how), make(model.parameters()))
    x = torch.cat([X, X + 1]).to(dtype)
    y = torch.cat([Y, Y])
    train(x, y)
    train.save(tmp_path / "saved")
    expected = [train(x, y) for _ in range(2)]
    wanted = weights(train)
    train.destroy()
    torch.manual_seed(123)
    loaded = poptorch.load(tmp_path / "saved")
    found = [loaded(x, y) for _ in range(2)]
    pairs = zip(sum(expected, ()), sum(found, ()), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    assert same(weights(loaded), wanted)


def test_random_numbers_go_on_without_a_seed_and_start_again_without_a_state(
    tmp_path: Path,
) -> None:
    executor = poptorch.inferenceModel(nn.Dropout(0.5))
    x = torch.ones(64)
    executor(x)
    executor.save(tmp_path / "on")
    executor.save(tmp_path / "anew", save_rng_state=False)
    state, expected = executor.rng_state, executor(x)
    executor.destroy()
    torch.manual_seed(5)
    on = poptorch.load(tmp_path / "on")
    assert on.rng_state == state and torch.equal(on(x), expected)
    on.destroy()
    assert poptorch.load(tmp_path / "anew").rng_state == [5, 0, 0]


def test_groups_of_replicas_keep_their_weights(tmp_path: Path) -> None:
    for mode, rows in (
        (VariableRetrievalMode.OnePerGroup, 2),
        (VariableRetrievalMode.AllReplicas, 4),
    ):
        model = Line(groups=2)
        train = poptorch.trainingModel(model, Options().replicationFactor(4))
        train.w.replicaGrouping(CommGroupType.Consecutive, 2, mode)
        train(torch.arange(4.0))
        train.save(tmp_path / "saved")
        train(torch.arange(4.0))
        wanted = weights(train)
        assert len(wanted["w"]) == rows
        train.destroy()
        loaded = poptorch.load(tmp_path / "saved")
        loaded(torch.arange(4.0))
        assert same(weights(loaded), wanted)
        loaded.destroy()


@pytest.mark.parametrize("train", [False, True])
def test_a_model_that_was_compiled_for_an_offline_target_runs(tmp_path: Path, train: bool) -> None:
    model, reference = Line(), Line()
    options = Options().useOfflineIpuTarget()
    make = poptorch.trainingModel if train else poptorch.inferenceModel
    offline = make(model, options)
    x = torch.arange(2.0)
    offline.compileAndExport(tmp_path / "offline", x)
    seen: list[object] = []
    loaded = poptorch.load(
        tmp_path / "offline", lambda options: seen.append(options.connection_type)
    )
    assert seen == [ConnectionType.Always.value] and options.connection_type != seen[0]
    here = make(reference)
    for _ in range(2):
        assert torch.equal(loaded(x), here(x))
    assert same(weights(loaded), weights(here))
    never = poptorch.load(
        tmp_path / "offline", lambda options: options.connectionType(ConnectionType.Never)
    )
    with pytest.raises(AssertionError, match="offline device"):
        never(x)


# ---------------------------------------------------------------- the log


READ_WEIGHTS = "Writing weights from IPU to host."
READ_OPTIMIZER = "Writing optimiser state tensors from IPU to host."
READ_RANDOM = ["Reading random seed", "Reading RNG state"]
WRITE_WEIGHTS = "Writing weights from host to IPU memory."
WRITE_OPTIMIZER = "Writing optimiser state tensors from host to IPU memory."
WRITE_RANDOM = ["Setting random seed to: 7", "Setting RNG state"]
TRAVELS = ("Writing", "Reading", "Setting", "Implicit copyWeightsToHost")


@pytest.fixture
def moved(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Take the lines of the log about states that were copied."""
    caplog.set_level(logging.DEBUG, "poptorch::python")

    def take() -> list[str]:
        found = [
            record.getMessage()
            for record in caplog.records
            if record.name == "poptorch::python" and record.getMessage().startswith(TRAVELS)
        ]
        caplog.clear()
        return found

    return take


def plain_sgd(parameters: Any) -> Any:
    return poptorch.optim.SGD(parameters, lr=0.1)  # its state is empty


@pytest.mark.parametrize("make", [plain_sgd, adam])
def test_states_that_travel_are_logged(
    tmp_path: Path, make: Callable[[Any], Any], moved: Callable[[], list[str]]
) -> None:
    model, x = Line(), torch.ones(1)
    train = poptorch.trainingModel(model, Options().randomSeed(7), make(model.parameters()))
    train(x)
    assert moved() == ["Setting random seed to: 7"]  # of the compilation
    train(x)
    assert moved() == []
    train.save(tmp_path / "saved")
    assert moved() == ["Implicit copyWeightsToHost()", READ_WEIGHTS, READ_OPTIMIZER, *READ_RANDOM]
    train.save(tmp_path / "bare", export_model=False, save_rng_state=False)
    assert moved() == []
    train.detachFromDevice()
    assert moved() == READ_RANDOM  # the others are those that were saved
    train.attachToDevice()
    assert moved() == [*WRITE_RANDOM, WRITE_OPTIMIZER, WRITE_WEIGHTS]
    train(x)
    assert moved() == []
    train.detachFromDevice()
    assert moved()[-3:] == [READ_OPTIMIZER, *READ_RANDOM]
    train(x)  # attaches
    assert moved() == [*WRITE_RANDOM, WRITE_OPTIMIZER, WRITE_WEIGHTS]
    train.destroy()
    moved()
    loaded = poptorch.load(tmp_path / "saved")
    assert moved() == [WRITE_RANDOM[0], WRITE_OPTIMIZER, *WRITE_RANDOM]
    loaded(x)
    loaded(x)
    assert moved() == [WRITE_WEIGHTS]  # before the first call


def test_training_goes_on_when_it_is_attached_again() -> None:
    def trained(between: Callable[[Any, Any], None]) -> tuple[dict[str, Tensor], Any]:
        torch.manual_seed(3)
        model = Model()
        optimizer = adam(model.parameters())
        train = poptorch.trainingModel(model, options_of(stochastic=True), optimizer)
        for _ in range(3):
            train(torch.cat([X, X + 1]), torch.cat([Y, Y]))
            between(train, optimizer)
        found, state = weights(train), optimizer.state_dict()
        train.destroy()
        return found, state

    def detach(train: Any, optimizer: Any) -> None:
        train.detachFromDevice()
        optimizer.param_groups[0]["lr"] = 0.5  # not without setOptimizer
        train.attachToDevice()

    alone, alone_state = trained(lambda train, optimizer: None)
    found, state = trained(detach)
    assert same(alone, found) and same(alone_state["ipu_state"], state["ipu_state"])


def test_a_state_that_is_loaded_while_detached_counts() -> None:
    first, second = Line(), Line()
    adams = adam(first.parameters()), adam(second.parameters())
    one, other = (
        poptorch.trainingModel(model, None, optimizer)
        for model, optimizer in zip((first, second), adams, strict=True)
    )
    for x in (1.0, -2.0):
        one(torch.tensor([x]))
    other(torch.tensor([3.0]))
    other.detachFromDevice()
    adams[1].load_state_dict(adams[0].state_dict())
    second.w.data.copy_(first.w.detach())
    other.rng_state = [11, 5, 4]
    other.attachToDevice()
    assert other.rng_state == [11, 5, 4]
    one(torch.ones(1))
    other(torch.ones(1))
    assert torch.equal(first.w.detach(), second.w.detach())


@pytest.mark.parametrize("make", [plain_sgd, adam, lambda p: torch.optim.Adam(p, lr=0.1)])
def test_an_offline_executable_has_no_state(
    tmp_path: Path, make: Callable[[Any], Any], moved: Callable[[], list[str]]
) -> None:
    model = Line()
    optimizer = make(model.parameters())
    options = Options().useOfflineIpuTarget().randomSeed(7)
    offline = poptorch.trainingModel(model, options, optimizer)
    offline.compile(torch.ones(1))
    assert moved() == ["Setting random seed to: 7"]
    offline.setOptimizer(make(model.parameters()))
    offline.setOptimizer(optimizer)
    offline.save(tmp_path / "offline")
    assert moved() == []
    if isinstance(optimizer, poptorch.optim.Optimizer):
        state = optimizer.state_dict()
        assert state["ipu_state"] is None and state["ipu_param"] is None
    offline.destroy()
    assert moved() == []
    with zipfile.ZipFile(tmp_path / "offline") as archive:
        assert json.loads(archive.read("header.json"))["rng_state"] is None
    reference = Line()
    here = poptorch.trainingModel(reference, None, make(reference.parameters()))
    loaded = poptorch.load(tmp_path / "offline")
    for x in (1.0, 2.0):
        loaded(torch.tensor([x]))
        here(torch.tensor([x]))
    assert same(weights(loaded), weights(here))


def test_an_offline_executable_keeps_the_state_that_its_optimizer_had(tmp_path: Path) -> None:
    model = Line()
    optimizer = adam(model.parameters())
    train = poptorch.trainingModel(model, None, optimizer)
    train(torch.ones(1))
    train.destroy()
    state = optimizer.state_dict()["ipu_state"]
    offline = poptorch.trainingModel(model, Options().useOfflineIpuTarget(), optimizer)
    offline.compileAndExport(tmp_path / "offline", torch.ones(1))
    assert same(optimizer.state_dict()["ipu_state"], state)
    offline.destroy()
    loaded = poptorch.load(tmp_path / "offline")
    again = poptorch.trainingModel(model, None, optimizer)
    loaded(-torch.ones(1))
    again(-torch.ones(1))
    assert same(weights(loaded), weights(again))


class Deciding(Line):
    """Decides on values, so that its replicas run in threads."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.sum()) > 0 else -x)


def test_a_model_whose_replicas_run_in_threads_goes_on(tmp_path: Path) -> None:
    train = poptorch.trainingModel(Deciding(), Options().replicationFactor(2))
    x = torch.tensor([1.0, -2.0])
    train(x)
    train.save(tmp_path / "saved")
    train(x)
    wanted = weights(train)
    train.destroy()
    loaded = poptorch.load(tmp_path / "saved")
    loaded(x)
    assert same(weights(loaded), wanted)


def test_a_model_with_blocks_keeps_them(tmp_path: Path) -> None:
    blocks = [BeginBlock(nn.Linear(2, 2), ipu_id=0), BeginBlock(nn.Linear(2, 2), ipu_id=1)]
    options = Options().setExecutionStrategy(poptorch.ShardedExecution())
    executor = poptorch.inferenceModel(nn.Sequential(*blocks), options)
    expected = executor(X)
    executor.save(tmp_path / "saved")
    executor.destroy()
    loaded = poptorch.load(tmp_path / "saved")
    assert torch.equal(loaded(X), expected) and loaded._compiled().plan.ipus == 2


def test_what_is_changed_in_the_model_after_training_counts(tmp_path: Path) -> None:
    model = Line().to(torch.bfloat16)
    train = poptorch.trainingModel(model, None, torch.optim.SGD(model.parameters(), lr=0.0123))
    train(torch.ones(1))
    model.w.data.fill_(5)
    train.save(tmp_path / "saved")
    train.destroy()
    loaded = poptorch.load(tmp_path / "saved")
    assert loaded.model.w.item() == 5
    loaded(torch.ones(1))
    assert loaded.model.w.item() > 4.9


def test_weights_that_are_loaded_after_the_file_count_more_than_its(tmp_path: Path) -> None:
    model = Line().to(torch.bfloat16)
    options = Options().connectionType(poptorch.ConnectionType.OnDemand)
    train = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.0123))
    train(torch.ones(1))
    train.save(tmp_path / "saved")
    train.destroy()
    loaded = poptorch.load(tmp_path / "saved")
    loaded.load_state_dict({"w": torch.tensor([5.0])})
    loaded(torch.ones(1))
    assert loaded.model.w.item() > 4.9


def test_a_file_is_the_same_every_time(tmp_path: Path) -> None:
    executor = poptorch.inferenceModel(Model().eval())
    executor.compileAndExport(tmp_path / "first", X)
    executor.save(tmp_path / "second")
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_tensors_are_in_a_file_that_others_read(tmp_path: Path) -> None:
    model = Model()
    optimizer = adam(model.parameters())
    train = poptorch.trainingModel(model, None, optimizer)
    train(X[:2], Y[:2])
    train.save(tmp_path / "saved")
    with zipfile.ZipFile(tmp_path / "saved") as archive:
        assert archive.namelist() == ["header.json", "model.pickle", "tensors.safetensors"]
        tensors = safetensors.torch.load(archive.read("tensors.safetensors"))
        header = json.loads(archive.read("header.json"))
        assert len(archive.read("model.pickle")) < 20_000
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(tensors[f"model.{name}"], value)
    assert "model.again" in tensors and "model.last.bias" not in tensors, "they are one"
    state = optimizer.state_dict()["ipu_state"]
    assert all(torch.equal(tensors[f"optimizer.{name}"], x) for name, x in state.items())
    assert header["arguments"]["args"] == [
        {"tensor": ["float32", [2, 2]]},
        {"tensor": ["int64", [2]]},
    ]
    assert header["weights"]["first.weight"] == ["float32", [4, 2]]
