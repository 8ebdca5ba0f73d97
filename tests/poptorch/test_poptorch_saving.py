"""Files of compiled models: what they bring back, what they refuse, and that they are whole."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import logging
import os
import pickle
import resource
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpusim import poptorch
from gpusim.poptorch import (
    CommGroupType,
    ConnectionType,
    Error,
    Options,
    VariableRetrievalMode,
)
from gpusim.poptorch.blocks import BeginBlock
from gpusim.poptorch.executor import context
from gpusim.poptorch.executor.arguments import Arguments
from gpusim.poptorch.executor.described import Undescribed, as_json, from_json
from gpusim.poptorch.executor.pickled import (
    DTYPES,
    pickled,
    read_tensors,
    tensors_as_bytes,
    unpickled,
)
from gpusim.poptorch.executor.saving import DIGEST

X = torch.linspace(-1.0, 1.0, 16).reshape(8, 2)
Y = torch.tensor([0, 1] * 4)


class Model(nn.Module):
    """Dropout, a buffer that changes, and a weight that is there twice."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first = nn.Linear(2, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.again = self.last.bias

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        hidden = nn.functional.dropout(self.norm(self.first(x)), 0.3, self.training)
        out = self.last(hidden) + self.again
        return out if y is None else (out, nn.functional.cross_entropy(out, y))


class Line(nn.Module):
    def __init__(self, groups: int = 0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(groups, 1) if groups else torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return poptorch.identity_loss(self.w * x, reduction="mean")


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Devices are free afterwards, whatever a test leaves behind."""
    yield
    for executor in list(context.living):
        executor.destroy()


def weights(executor: poptorch.PoplarExecutor) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in executor.model.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def line(tmp_path: Path, **how: Any) -> Path:
    """A small file."""
    executor = poptorch.inferenceModel(Line())
    executor.compileAndExport(tmp_path / "line", torch.ones(1), **how)
    executor.destroy()
    return tmp_path / "line"


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


# ---------------------------------------------------------------- loadExecutable


def test_an_executable_is_checked_against_the_model_and_its_options(tmp_path: Path) -> None:
    options = Options().replicationFactor(2)
    executor = poptorch.inferenceModel(Line(), options)
    executor.compileAndExport(tmp_path / "f", torch.ones(4), export_model=False)
    executor.destroy()
    path = tmp_path / "f"

    def refused(other: poptorch.PoplarExecutor, text: str) -> None:
        with pytest.raises(Error, match=rf"Invalid file .*f: {text}"):
            other.loadExecutable(path)
        assert not other.isCompiled()

    refused(poptorch.inferenceModel(Line()), "option replicationFactor is 2 in the file, and this")
    refused(
        poptorch.inferenceModel(Line(groups=2), options),
        r"weight w is \['float32', \[1\]\] in the file, and this model's is \[.*, \[2, 1\]\]",
    )
    refused(poptorch.inferenceModel(Model(), options), r"weight w is .* this model's is None")
    refused(
        poptorch.trainingModel(Line(), options),
        "it is of an inference model, and this is a training model",
    )
    good = poptorch.inferenceModel(Line(), options)
    good.loadExecutable(path)
    good.loadExecutable(path)
    assert torch.equal(good(torch.ones(4)), torch.ones(2))


@dataclasses.dataclass
class Pair:
    x: Tensor
    scale: float


def scaled(pair: Pair) -> Tensor:
    return pair.x * pair.scale


def test_arguments_of_other_types_need_the_pickle(tmp_path: Path) -> None:
    executor = poptorch.inferenceModel(scaled)
    executor.compile(Pair(torch.ones(2), 3.0))
    with pytest.raises(Error, match=r"argument pair is of type .*Pair, which no file without the"):
        executor.save(tmp_path / "f", export_model=False)
    assert not (tmp_path / "f").exists()
    executor.save(tmp_path / "f")
    executor.destroy()
    loaded = poptorch.load(tmp_path / "f")
    assert torch.equal(loaded(Pair(torch.ones(2), 3.0)), torch.full((2,), 3.0))
    loaded.destroy()
    with pytest.raises(Error, match="are of types that only poptorch"):
        poptorch.inferenceModel(scaled).loadExecutable(tmp_path / "f")


CONSTANTS: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.binary() | st.complex_numbers(allow_nan=False)
    | st.sampled_from([torch.float16, torch.device("cpu"), slice(1, None, 2), range(3)]),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple)
    | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner),
    max_leaves=8,
)  # fmt: skip


@given(CONSTANTS)
def test_constants_come_back_from_json(value: Any) -> None:
    arguments = Arguments(("c", "x"), (value, torch.ones(2, 1)), {"more": [value]})
    found = from_json(json.loads(json.dumps(as_json(arguments))))
    assert found.args[0] == value and type(found.args[0]) is type(value)
    assert found.kwargs == {"more": [value]} and found.names == arguments.names
    assert found.args[1].shape == (2, 1) and found.args[1].is_meta


def test_constants_of_other_types_have_no_such_form() -> None:
    for value in (Pair(X, 1.0), object(), {1, 2}, torch.Size([1]), print):
        with pytest.raises(Undescribed, match="argument c is of type"):
            as_json(Arguments(("c",), (value,), {}))


@pytest.mark.parametrize(
    "found",
    [
        None, 3, {}, {"names": [], "args": [1], "kwargs": {}},
        {"names": ["x"], "args": [{"tensor": ["nothing", [1]]}], "kwargs": {}},
        {"names": ["x"], "args": [{"tensor": ["save", [1]]}], "kwargs": {}},
        {"names": ["x"], "args": [{"tensor": ["float32", [-1]]}], "kwargs": {}},
        {"names": ["x"], "args": [{"other": 1}], "kwargs": {}},
        {"names": ["x"], "args": [{"a": 1, "b": 2}], "kwargs": {}},
        {"names": ["x"], "args": [{"range": ["a"]}], "kwargs": {}},
        {"names": ["x"], "args": [{"dict": [[[1], 2]]}], "kwargs": {}},
        {"names": [1], "args": [1], "kwargs": {}},
        {"names": ["x"], "args": [1], "kwargs": [1]},
    ],
)  # fmt: skip
def test_json_that_describes_nothing_is_refused(found: Any) -> None:
    with pytest.raises(ValueError, match=r"its arguments make no sense: \w+: "):
        from_json(found)


# ---------------------------------------------------------------- what is refused


def refused(path: Path) -> str:
    """The message of both that read files; nothing is compiled."""
    executor = poptorch.inferenceModel(Line())
    with pytest.raises(Error) as one:
        executor.loadExecutable(path)
    with pytest.raises(AssertionError) as two:
        poptorch.load(path)
    assert not executor.isCompiled()
    start = f"Invalid file {path}: "
    assert str(two.value).startswith(start) and one.value.message == str(two.value)
    return str(two.value).removeprefix(start)


def test_every_byte_that_changes_is_noticed(tmp_path: Path) -> None:
    path = line(tmp_path)
    content = path.read_bytes()
    for place in range(0, len(content), 97):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        message = refused(path)
        assert message.startswith("it is damaged") or place < 4
    path.write_bytes(content)
    poptorch.load(path)


def test_every_length_but_the_whole_is_noticed(tmp_path: Path) -> None:
    path = line(tmp_path)
    content = path.read_bytes()
    for length in (0, 1, 3, 4, 63, 64, 65, *range(100, len(content), 211), len(content) - 1):
        path.write_bytes(content[:length])
        assert refused(path).startswith("it is damaged" if length >= 4 else "it does not begin as")
    path.write_bytes(content + b"0")
    assert refused(path).startswith("it is damaged")


def sealed(path: Path, parts: dict[str, bytes], **how: Any) -> Path:
    """A zip of parts, with the digest that it has to have."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", how.get("compression", zipfile.ZIP_STORED)) as archive:
        archive.comment = b"0" * DIGEST
        for name, content in parts.items():
            archive.writestr(zipfile.ZipInfo(name), content, how.get("compression"))
        if how.get("twice"):
            with pytest.warns(UserWarning, match="Duplicate name"):
                archive.writestr(how["twice"], parts[how["twice"]])
    body = buffer.getvalue()[:-DIGEST]
    path.write_bytes(body + hashlib.sha256(body).hexdigest().encode())
    return path


def parts_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_zips_of_others_are_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.zip"
    with zipfile.ZipFile(foreign, "w") as archive:
        archive.writestr("data.pkl", b"")
    assert refused(foreign) == "it is damaged, or a zip that PopTorch did not write"
    torch.save(Line(), foreign)
    assert refused(foreign) == "it is damaged, or a zip that PopTorch did not write"
    parts = parts_of(line(tmp_path))
    assert "has the parts other" in refused(sealed(foreign, {"other": b""}))
    assert "has the parts" in refused(sealed(foreign, {**parts, "../../more": b""}))
    assert "has the parts" in refused(
        sealed(foreign, {"header.json": parts["header.json"], "x": b""})
    )
    assert "compressed" in refused(sealed(foreign, parts, compression=zipfile.ZIP_DEFLATED))
    assert "has the parts" in refused(sealed(foreign, parts, twice="header.json"))
    body = b"PK\3\4 and no zip"
    foreign.write_bytes(body + hashlib.sha256(body).hexdigest().encode())
    assert refused(foreign).startswith("it is a zip that cannot be read: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "its header is not PopTorch's"),
        (
            {"format_version": 2},
            "it is of version 2 of the format, and this gpusim reads version 1",
        ),
        (
            {"poptorch_version": "2.0"},
            "PopTorch version mismatch: File was created with version: 2.0 and this is version "
            + poptorch.__version__,
        ),
        ({"training": 1}, "its header's 'training' is 1"),
        ({"rng_state": "x"}, "its header's 'rng_state' is 'x'"),
        ({"rng_state": [1, 2]}, r"its header's 'rng_state' is [1, 2]"),
        ({"rng_state": [1, 2, 3.0]}, r"its header's 'rng_state' is [1, 2, 3.0]"),
        ({"model": False}, "its header is not of these parts"),
        (
            {"arguments": {"names": 3}},
            "its header makes no sense: ValueError: its arguments make no",
        ),
        (
            {"groupings": {"w": ["Nobody", 1, "AllReplicas"]}},
            "its header makes no sense: KeyError:",
        ),
        ({"groupings": {"w": 3}}, "its header makes no sense: TypeError:"),
    ],
)
def test_headers_that_make_no_sense_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    parts = parts_of(line(tmp_path))
    header = {**json.loads(parts["header.json"]), **change}
    path = sealed(tmp_path / "f", {**parts, "header.json": json.dumps(header).encode()})
    assert refused(path).startswith(message)


def test_headers_that_are_no_json_are_refused(tmp_path: Path) -> None:
    parts = parts_of(line(tmp_path))
    for text in (b"", b"\xff", b"[1, 2", b"[" * 100_000):
        message = refused(sealed(tmp_path / "f", {**parts, "header.json": text}))
        assert message.startswith("its header is not JSON: ")
    assert refused(sealed(tmp_path / "f", {**parts, "header.json": b"[]"})).startswith("its header")
    header = {**json.loads(parts["header.json"]), "arguments": None, "model": False}
    path = sealed(tmp_path / "f", {"header.json": json.dumps(header).encode()})
    assert refused(path) == "The executable's inputs are missing"


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_executed_by_load_alone(tmp_path: Path) -> None:
    parts = parts_of(line(tmp_path))
    sign = tmp_path / "hacked"
    path = sealed(tmp_path / "f", {**parts, "model.pickle": pickle.dumps(Bomb(sign))})
    executor = poptorch.inferenceModel(Line())
    executor.loadExecutable(path)
    assert torch.equal(executor(torch.ones(1)), torch.ones(())) and not sign.exists()
    executor.destroy()
    damaged = path.read_bytes()
    (tmp_path / "g").write_bytes(damaged[:-1] + b"x")
    refused(tmp_path / "g")
    assert not sign.exists(), "what is damaged is not unpickled at all"
    with pytest.raises(AttributeError):
        poptorch.load(path)
    assert sign.exists(), "the test's bomb is one"


# ---------------------------------------------------------------- tensors in files


TENSORS = {
    **{str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES},
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    'a "name"\n': torch.tensor([1]),
}


def equal(left: Tensor, right: Tensor) -> bool:
    same_kind = left.dtype == right.dtype and left.shape == right.shape

    one, two = (x.contiguous().reshape(-1).view(torch.uint8) for x in (left, right))
    return same_kind and torch.equal(one, two)


def test_tensor_files_are_those_of_safetensors() -> None:
    content = tensors_as_bytes(TENSORS)
    theirs = safetensors.torch.load(content)
    ours = read_tensors(content)
    assert ours.keys() == TENSORS.keys() == theirs.keys()
    assert all(equal(ours[name], x) and equal(theirs[name], x) for name, x in TENSORS.items())
    contiguous = {name: x.contiguous() for name, x in TENSORS.items()}
    back = read_tensors(safetensors.torch.save(contiguous, {"about": "theirs"}))
    assert all(equal(back[name], x) for name, x in TENSORS.items())


@pytest.mark.parametrize(
    "table",
    [
        "3", "{", '{"a": 3}', '{"a": {}}', '{"a": {"dtype": "F32", "shape": [1]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 3]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        '{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        ' "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    ],
)  # fmt: skip
def test_tables_that_lie_are_refused(table: str) -> None:
    content = len(table).to_bytes(8, "little") + table.encode() + bytes(4)
    with pytest.raises(ValueError, match=r"^tensors: "):
        read_tensors(content)


@given(st.binary(max_size=40))
def test_any_bytes_are_tensors_or_an_error(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert read_tensors(content) == {}


def test_damaged_tensors_are_refused_by_load(tmp_path: Path) -> None:
    parts = parts_of(line(tmp_path))
    path = sealed(tmp_path / "f", {**parts, "tensors.safetensors": b"\xff" * 9})
    with pytest.raises(AssertionError, match=r"^Invalid file .*: tensors: 9 bytes are fewer than"):
        poptorch.load(path)


class Tagged(Tensor):
    """A tensor of the user's own class."""


def test_tensors_share_what_they_shared() -> None:
    whole = torch.arange(12.0)
    parameter = nn.Parameter(torch.ones(2), requires_grad=False)
    tagged = torch.ones(1)
    tagged.tag = "mine"
    value = {
        "views": [whole[2:4], whole.reshape(3, 4).T, whole],
        "same": (parameter, parameter, parameter.data),
        "bits": whole.view(torch.int32)[:1],
        "kinds": [torch.ones(1, dtype=torch.complex128), torch.eye(2).to_sparse(), tagged],
        "class": torch.ones(2).as_subclass(Tagged),
        "grad": torch.ones(1, requires_grad=True),
    }
    content, tensors = pickled(value, {id(parameter): "weight"})
    assert len([name for name in tensors if name.startswith("weight")]) == 1
    found = unpickled(content, read_tensors(tensors_as_bytes(tensors)))
    for one, two in zip(value["views"], found["views"], strict=True):
        assert torch.equal(one, two) and one.stride() == two.stride()
    found["views"][2][2] = 99.0
    assert found["views"][0][0] == 99 and found["views"][1][2, 0] == 99
    first, second, data = found["same"]
    assert first is second and type(first) is nn.Parameter and not first.requires_grad
    assert data.data_ptr() == first.data_ptr()
    assert found["bits"].data_ptr() == found["views"][2].data_ptr()
    assert torch.equal(found["kinds"][0], value["kinds"][0]) and found["kinds"][1].is_sparse
    assert found["kinds"][2].tag == "mine" and type(found["class"]) is Tagged
    assert found["grad"].requires_grad


# ---------------------------------------------------------------- whole or not at all


def left_in(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


@pytest.mark.parametrize("fails", ["write", "fsync", "replace", "interrupt"])
@pytest.mark.parametrize("before", [None, b"what was there"])
def test_a_file_that_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, before: bytes | None
) -> None:
    path = tmp_path / "model"
    if before is not None:
        path.write_bytes(before)
    executor = poptorch.inferenceModel(Line())
    executor.compile(torch.ones(1))
    full = OSError(errno.ENOSPC, "No space left on device")

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt if fails == "interrupt" else full

    with monkeypatch.context() as patch:
        if fails in ("write", "interrupt"):
            patch.setattr(zipfile._ZipWriteFile, "write", failing)
        else:
            patch.setattr(os, fails, failing)
        with pytest.raises(KeyboardInterrupt if fails == "interrupt" else OSError):
            executor.save(path)
    assert left_in(tmp_path) == ([] if before is None else ["model"])
    assert before is None or path.read_bytes() == before
    executor.save(path)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()
    executor.destroy()
    poptorch.load(path)


def umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def test_a_file_that_the_system_cuts_off_is_not_there(tmp_path: Path) -> None:
    executor = poptorch.inferenceModel(nn.Linear(100, 100))
    executor.compile(torch.ones(1, 100))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            executor.save(tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert left_in(tmp_path) == []


def test_a_model_whose_class_is_gone_is_pythons_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = line(tmp_path)
    monkeypatch.delattr(sys.modules[__name__], "Line")
    with pytest.raises(AttributeError, match="Line") as raised:
        poptorch.load(path)
    assert raised.value.__notes__[0].startswith("The classes of a saved model have to be where")


def test_what_cannot_be_pickled_leaves_no_file(tmp_path: Path) -> None:
    executor = poptorch.inferenceModel(lambda x: x + 1)
    executor.compile(torch.ones(1))
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        executor.save(tmp_path / "new" / "f")
    assert left_in(tmp_path) == []
    executor.save(tmp_path / "f", export_model=False)
    assert left_in(tmp_path) == ["f"]


def test_links_stay_links_and_devices_stay_devices(tmp_path: Path) -> None:
    executor = poptorch.inferenceModel(Line())
    executor.compile(torch.ones(1))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").write_bytes(b"")
    (tmp_path / "real").chmod(0o600)
    executor.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").stat().st_size > 100
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o600
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe is not a regular file"):
        executor.save(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        poptorch.load(tmp_path / "none")
