"""PoplarExecutor: tensors by name, anchors, measured times, and tracepoints."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpusim import poptorch
from gpusim.poptorch import Error, Options, OutputMode
from gpusim.poptorch.executor.counters import CLOCK, EVENTS
from tests.poptorch.executor_models import Model, X, Y, training

pytestmark = pytest.mark.usefixtures("ended")

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
