"""What happens between making an executor and its first call: weights, groups, options, inputs."""

from __future__ import annotations

import copy
import io
import logging
import os
import pickle
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpusim
from bench import mpirun
from gpusim import poptorch
from gpusim.poptorch import CommGroupType, Error, Options, VariableRetrievalMode
from tests.oracles.machine_time import PATIENCE

pytestmark = pytest.mark.usefixtures("ended")

ROOT = Path(__file__).parents[2]
X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
ONE_PER_GROUP = VariableRetrievalMode.OnePerGroup


class Inner(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(groups, 1) if groups else torch.zeros(1))


class Model(nn.Module):
    """Adds two weights to its input, and has the mean as its loss."""

    def __init__(self, groups: int = 0, value: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((groups, 1) if groups else (1,), value))
        self.inner = Inner(groups)

    def forward(self, x: Tensor) -> Any:
        out = x + self.w + self.inner.weight
        return out, poptorch.identity_loss(out, "mean")


def training(model: nn.Module, options: Options | None = None) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1.0))


# ---------------------------------------------------------------- weights


def test_inference_has_the_weights_that_were_loaded_after_compiling() -> None:
    model = Model()
    infer = poptorch.inferenceModel(model)
    infer.compile(X)
    model.load_state_dict(Model(value=5.0).state_dict())
    assert torch.equal(infer(X)[0], X + 5)
    model.load_state_dict(Model(value=7.0).state_dict())
    assert torch.equal(infer(X)[0], X + 5)  # only the first call copies them


def test_training_goes_on_from_the_weights_that_were_loaded_after_compiling() -> None:
    model = Model()
    train = training(model)
    train.compile(X)
    model.load_state_dict(Model(value=5.0).state_dict())
    train(X)
    assert (model.w.item(), model.inner.weight.item()) == (4.0, -1.0)


def test_weights_that_were_copied_by_hand_are_not_copied_again() -> None:
    model = Model(value=5.0)
    infer = poptorch.inferenceModel(model)
    infer.compile(X)
    infer.copyWeightsToDevice()
    model.load_state_dict(Model(value=7.0).state_dict())
    assert torch.equal(infer(X)[0], X + 5)


def test_a_loaded_executor_has_what_its_model_rounds_unless_the_model_was_changed(
    tmp_path: Path,
) -> None:
    model = Model(value=1.0).bfloat16()  # float32 on the device
    train = poptorch.trainingModel(model, None, torch.optim.SGD(model.parameters(), lr=2.0**-10))
    train(X)
    train.save(tmp_path / "file")
    as_saved, changed = (poptorch.load(tmp_path / "file") for _ in range(2))
    changed.model.load_state_dict(Model(value=3.0).bfloat16().state_dict())
    want = train(X)[0]
    assert not torch.equal(want, X + 1)
    assert torch.equal(as_saved(X)[0], want)
    assert torch.equal(changed(X)[0], X + 3)


# ---------------------------------------------------------------- several processes

TRAINS = """
import os, torch
from gpusim import poptorch

processes = int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))
process = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
model = torch.nn.Linear(2, 1)
with torch.no_grad():
    for weight in model.parameters():
        weight.fill_(0.5)


class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.model(x), y)


step = Step()
options = poptorch.Options().replicationFactor(4 // processes).showCompilationProgressBar(False)
train = poptorch.trainingModel(step, options, torch.optim.SGD(step.parameters(), lr=0.1))
generator = torch.Generator().manual_seed(1)
own = slice(process * 4 // processes, (process + 1) * 4 // processes)
for x in torch.randn(3, 4, 2, generator=generator):
    train(x[own], x[own, :1] - 1)
print("weights", [weight.tolist() for weight in step.parameters()], flush=True)
"""


@pytest.mark.slow
def test_processes_that_mpirun_starts_train_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With PopTorch's own options, which read Open MPI's variables."""
    for name in [*os.environ]:
        if name.startswith(("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "POPDIST_", "GPUSIM_")):
            monkeypatch.delenv(name)
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    alone = str([weight.tolist() for weight in runpy.run_path(str(script))["step"].parameters()])
    start = mpirun.command(2)
    assert start is not None
    done = subprocess.run(
        [*start, sys.executable, script],
        env=mpirun.environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall("^weights (.*)$", done.stdout, re.MULTILINE) == [alone, alone]


@pytest.mark.parametrize("make", [training, poptorch.inferenceModel])
def test_processes_that_nobody_started_cannot_be_one(make: Any) -> None:
    options = Options()
    options.Distributed.configureProcessId(0, 2)
    executor = make(Model(), options)
    named = r"process 0 of 2, .*poprun.*popdist\.poptorch\.Options.*gpusim\.World.*disable\(\)"
    with pytest.raises(Error, match=named):
        executor(X)
    with gpusim.World([1]):
        assert executor(X)[0].shape == X.shape


# ---------------------------------------------------------------- groups of replicas


@pytest.mark.parametrize("make", [training, poptorch.inferenceModel])
def test_an_executors_parameter_is_the_models(make: Any) -> None:
    model = Model()
    executor = make(model)
    assert executor.w is model.w and isinstance(executor.w, nn.Parameter)
    assert torch.equal(executor.w + 1, torch.ones(1)) and len(executor.w) == 1
    assert torch.equal(torch.stack([executor.w]), torch.zeros(1, 1))


@pytest.mark.parametrize("make", [training, poptorch.inferenceModel])
def test_weights_of_layers_can_be_grouped(make: Any) -> None:
    model = Model(groups=2)
    with torch.no_grad():
        model.w.copy_(torch.tensor([[1.0], [2.0]]))
        model.inner.weight.copy_(torch.tensor([[10.0], [20.0]]))
    executor = make(model, Options().replicationFactor(2).outputMode(poptorch.OutputMode.All))
    executor.model.w.replicaGrouping(CommGroupType.Consecutive, 1, ONE_PER_GROUP)
    executor.inner.weight.replicaGrouping(CommGroupType.NoGrouping, 0, ONE_PER_GROUP)
    out, _ = executor(torch.zeros(2, 1))
    assert out.tolist() == [[11.0], [22.0]]


@pytest.mark.parametrize("make", [training, poptorch.inferenceModel])
def test_groups_can_be_written_by_name(make: Any) -> None:
    model = Model(groups=2)
    with torch.no_grad():
        model.w.copy_(torch.tensor([[1.0], [2.0]]))
        model.inner.weight.copy_(torch.tensor([[10.0], [20.0]]))
    executor = make(model, Options().replicationFactor(2).outputMode(poptorch.OutputMode.All))
    assert executor.per_replica_params == {}
    each = (CommGroupType.Consecutive, 1, ONE_PER_GROUP)
    executor.per_replica_params["w"] = each
    executor.inner.weight.replicaGrouping(CommGroupType.NoGrouping, 0, ONE_PER_GROUP)
    out, _ = executor(torch.zeros(2, 1))
    assert out.tolist() == [[11.0], [22.0]]
    assert executor.per_replica_params == {
        "w": each,
        "inner.weight": (CommGroupType.NoGrouping, 0, ONE_PER_GROUP),
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("v", (CommGroupType.Consecutive, 1, ONE_PER_GROUP), "'v' is not a parameter"),
        ("w", CommGroupType.Consecutive, "expected \\(CommGroupType, number"),
        ("w", (17, 1, ONE_PER_GROUP), "expected \\(CommGroupType, number"),
    ],
)
def test_groups_that_are_written_wrong_are_refused(name: str, value: Any, message: str) -> None:
    infer = poptorch.inferenceModel(Model())
    infer.per_replica_params[name] = value
    with pytest.raises(Error, match=message):
        infer(X)


def test_training_and_inference_of_a_model_have_groups_of_their_own() -> None:
    model = Model(groups=2, value=1.0)
    options = Options().replicationFactor(2)
    train, infer = training(model, options), poptorch.inferenceModel(model, options)
    for executor in (infer, train):
        for weight in (executor.w, executor.inner.weight):
            weight.replicaGrouping(CommGroupType.Consecutive, 1, ONE_PER_GROUP)
    infer.inner.weight.replicaGrouping(CommGroupType.All, 0, ONE_PER_GROUP)
    train(torch.zeros(2, 1))
    assert model.w.tolist() == [[0.5], [0.5]]
    assert infer(torch.zeros(2, 1))[0].shape == (4, 1)  # the other weight is two in each replica


def test_a_group_of_all_replicas_is_no_group() -> None:
    model = Model(value=2.0)
    infer = poptorch.inferenceModel(model, Options().replicationFactor(2))
    for kind in (CommGroupType.NoGrouping, CommGroupType.All):
        infer.w.replicaGrouping(kind, 2, ONE_PER_GROUP)
    assert torch.equal(infer(X)[0], X + 2)  # its only dimension counts no groups


@pytest.mark.parametrize("make", [training, poptorch.inferenceModel])
def test_a_compiled_model_is_not_grouped(make: Any) -> None:
    model = Model()
    executor = make(model)
    executor(X)
    with pytest.raises(Error, match=r"before it is compiled: call destroy\(\) first"):
        executor.w.replicaGrouping(CommGroupType.Consecutive, 1, ONE_PER_GROUP)
    executor.destroy()
    executor.w.replicaGrouping(CommGroupType.All, 1, ONE_PER_GROUP)
    executor(X)
    executor.destroy()
    assert type(model.w) is nn.Parameter


def test_what_can_be_grouped_is_pickled_and_copied_as_it_was() -> None:
    model = Model(value=3.0)
    model.w.note = "mine"
    infer = poptorch.inferenceModel(model)
    assert infer.w is model.w and type(model.w) is not nn.Parameter
    assert b"gpusim" not in pickle.dumps(model.w)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(other.w) is nn.Parameter and torch.equal(other.w, model.w)
    assert pickle.loads(pickle.dumps(model)).w.note == "mine"
    buffer = io.BytesIO()
    torch.save([model.w, model.inner.weight], buffer)
    buffer.seek(0)
    assert [type(one) for one in torch.load(buffer, weights_only=True)] == 2 * [nn.Parameter]


# ---------------------------------------------------------------- inputs


def test_an_expanded_input_is_left_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    def add(x: Tensor) -> Tensor:
        x += 1
        return x * 2

    infer = poptorch.inferenceModel(add)
    given, expanded = torch.ones(4), torch.ones(1).expand(4)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(infer(given), torch.full((4,), 4.0))
        assert torch.equal(given, torch.full((4,), 2.0)) and "expanded" not in caplog.text
        assert torch.equal(infer(expanded), torch.full((4,), 4.0))
    assert torch.equal(expanded, torch.ones(4))
    assert "An input of shape [4] was changed in place" in caplog.text


class Pair:
    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right


class ToNamespace(poptorch.ICustomArgParser):
    """Gives forward a value of another type than the caller's."""

    def yieldTensors(self, struct: Any) -> Iterator[Tensor]:
        yield struct.left
        yield struct.right

    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[Tensor]) -> Any:
        return SimpleNamespace(left=next(tensor_iterator), right=next(tensor_iterator))


def difference(pair: Any, x: Tensor) -> Tensor:
    assert isinstance(pair, SimpleNamespace)
    return pair.left - pair.right * x


class Difference(nn.Module):
    def forward(self, pair: Any, x: Tensor) -> Tensor:
        return difference(pair, x)


@pytest.fixture
def parser() -> Iterator[None]:
    poptorch.registerCustomArgParser(Pair, ToNamespace())
    yield
    poptorch.registerCustomArgParser(Pair, None)


@pytest.mark.usefixtures("parser")
def test_a_parser_may_make_another_type(tmp_path: Path) -> None:
    infer = poptorch.inferenceModel(Difference(), Options().deviceIterations(2))
    for one in (infer, None):
        executor = one or poptorch.load(tmp_path / "file")
        for factor in (1.0, 2.0):
            pair = Pair(factor * X, X)
            assert torch.equal(executor(pair, X[:, :1]), factor * X - X * X[:, :1])
        with pytest.raises(Error, match=r"Shape mismatch for pair\[1\]"):
            executor(Pair(X, X[:1]), X[:, :1])
        with pytest.raises(Error, match=r"expected <class '.*Pair'> but got <class '.*Namespace'>"):
            executor(SimpleNamespace(), X[:, :1])
        executor.save(tmp_path / "file")
        with pytest.raises(Error, match=r"argument pair is of type .*\.Pair"):
            executor.save(tmp_path / "other", export_model=False)


# ---------------------------------------------------------------- options, optimizers, times


def test_options_of_an_executor_that_could_not_be_made_can_be_changed() -> None:
    options, model = Options(), Model()
    with pytest.raises(AssertionError):
        poptorch.trainingModel(model, options, torch.optim.Adagrad(model.parameters()))
    options.deviceIterations(2)
    training(model, options)
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        options.deviceIterations(3)


@pytest.mark.parametrize(
    ("replicas", "text"),
    [
        (2, "input_group_size cannot be larger than replication_factor"),
        (6, "input_group_size must be a factor of replication_factor"),
    ],
)
def test_replicas_that_do_not_divide_into_input_groups_are_an_error(
    replicas: int, text: str
) -> None:
    options = Options().replicationFactor(4).inputReplicaGrouping(4, CommGroupType.Consecutive)
    with pytest.raises(ValueError, match=text):
        poptorch.inferenceModel(Model(), options.replicationFactor(replicas))
    poptorch.inferenceModel(Model(), options.replicationFactor(8))


def test_there_are_no_times_of_what_was_destroyed() -> None:
    infer = poptorch.inferenceModel(Model())
    infer(X)
    assert infer.getLatency()[0] > 0
    infer.destroy()
    assert infer.getLatency() == infer.getComputeLatency() == (0.0, 0.0, 0.0)
    assert infer.getPerfCounters()["input"] == [[]]


def test_an_optimizer_of_another_kind_replaces_the_first_before_compilation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Model()
    with caplog.at_level(logging.WARNING):
        train = poptorch.trainingModel(model)
        train.setOptimizer(poptorch.optim.AdamW(model.parameters()))
        assert "Ignoring unexpected" not in caplog.text
        wrong = poptorch.optim.AdamW(model.parameters())
        wrong.param_groups[0]["other"] = 1
        train.setOptimizer(wrong)
    assert "Ignoring unexpected group 0 attribute in ADAMW optimizer: ['other']" in caplog.text
