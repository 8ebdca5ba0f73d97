"""`gpusim run --check` names the lines of a forward method that read values, and no others."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpusim import poptorch
from gpusim.recording.reads import HostRead, listener, listening
from gpusim.tools import cli
from tests.check.cases import POPTORCH, Case, cases, run

KIND = "host-read-in-forward"
PROGRAMS = {case.path.stem: case for case in cases("host_read_in_forward")}
X = torch.arange(1.0, 9.0).reshape(4, 2)


class Model(nn.Module):
    """A model whose forward is a function of the model and the input."""

    offset: Tensor

    def __init__(self, function: Callable[[Any, Tensor], Any], trained: bool = False) -> None:
        super().__init__()
        self.function, self.trained = function, trained
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("offset", torch.tensor(1))
        self.table = torch.tensor([1.0, 2.0])  # neither input nor state
        self.kept: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        y = self.function(self, x)
        return (y, poptorch.identity_loss(y.sum(), "sum")) if self.trained else y


def read_by(
    function: Callable[[Any, Tensor], Any],
    *,
    training: bool = False,
    replicas: int = 2,
    execution: str | None = None,
    iterations: int = 1,
    x: Tensor = X,
) -> list[HostRead]:
    """The lines that read values as a model runs twice."""
    options = poptorch.Options().replicationFactor(replicas).deviceIterations(iterations)
    if execution is not None:
        options._Popart.set("gpusim.execution", execution)
    model = Model(function, training)
    executor: Any
    if training:
        options.Training.gradientAccumulation(2)
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
        executor = poptorch.trainingModel(model, options, optimizer)
    else:
        executor = poptorch.inferenceModel(model, options)
    with listening() as reads:
        for _ in range(2):
            executor(x)
    executor.destroy()
    return [*reads]


# ---------------------------------------------------------------- the programs


@pytest.mark.parametrize("fixed", [False, True], ids=["fault", "fixed"])
def test_the_command_names_the_line_and_ends_with_1(fixed: bool) -> None:
    case = PROGRAMS["host_read_in_forward_5"]
    said = run(case.options, case.path, *["--fixed"] * fixed)
    if fixed:
        assert (said.code, said.findings) == (0, []), said.output
        assert "gpusim run: check: no findings" in said.output
    else:
        assert said.code == 1 and case.found(said.findings) == "named", said.output
        first, second = said.findings
        assert (first["ranks"], second["ranks"]) == ([0, 1], [1])
        assert f"{KIND} at {first['site']}, replicas 0, 1\n" in said.output


@pytest.mark.parametrize("fixed", [False, True], ids=["fault", "fixed"])
@pytest.mark.parametrize("case", PROGRAMS.values(), ids=list(PROGRAMS))
def test_programs(case: Case, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "poptorch", poptorch)
    monkeypatch.setattr(sys, "argv", [str(case.path), *["--fixed"] * fixed])
    with listening() as reads:
        runpy.run_path(str(case.path), run_name="__main__")
    found = [{"kind": KIND, "site": each.site, "ranks": sorted(each.replicas)} for each in reads]
    assert not found if fixed else case.found(found) == "named", found


def test_there_are_five_programs() -> None:
    assert len(PROGRAMS) == len([*POPTORCH.glob("*.py")]) == 5


# ---------------------------------------------------------------- what reads


READS: dict[str, Callable[[Any, Tensor], Any]] = {
    "Tensor.item()": lambda model, x: x * x[0, 0].item(),
    "int()": lambda model, x: x * int(model.offset),
    "float()": lambda model, x: x * float(model.weight.sum()),
    "complex()": lambda model, x: x * complex(x[0, 0]).real,
    "bool()": lambda model, x: x if x.sum() > 0 else -x,
    "an index": lambda model, x: x * len(range(model.offset)),
    "Tensor.tolist()": lambda model, x: x * x.tolist()[0][0],
    "Tensor.numpy()": lambda model, x: x + torch.from_numpy(x.detach().numpy()),
    "NumPy": lambda model, x: x * float(np.linalg.norm(x.detach())),
    "printing": lambda model, x: x * len(str(x)),
    "in": lambda model, x: x * (2.0 in x),
    "torch.equal()": lambda model, x: x * torch.equal(x, x),
    "torch.full()": lambda model, x: x + torch.full((2,), x[0, 0]),
    "torch.tensor()": lambda model, x: x + torch.tensor([x[0, 0], 1.0]),
    "expand()": lambda model, x: x.sum().expand(model.offset),
}


@pytest.mark.parametrize("way", READS)
def test_a_read_is_named_once_with_its_line_and_replicas(way: str) -> None:
    function = READS[way]
    (read,) = read_by(function)
    code = function.__code__
    assert read.site == f"{__file__}:{code.co_firstlineno}"
    assert (list(read.ways), read.replicas) == ([way], {0, 1})
    assert f"is read by {way} in the forward of Model" in str(read)


def test_an_index_of_one_element_and_a_bound_of_a_slice_are_read() -> None:
    for function in (lambda model, x: x[model.offset], lambda model, x: x[: model.offset]):
        (read,) = read_by(function)
        assert list(read.ways) == ["an index"]


@pytest.mark.parametrize("execution", ["threads", None])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("replicas", [1, 4])
def test_models_of_all_kinds(execution: str | None, training: bool, replicas: int) -> None:
    x = torch.arange(32.0).reshape(16, 2)
    found = read_by(
        lambda model, x: x * model.weight * x.sum().item(),
        training=training,
        replicas=replicas,
        execution=execution,
        x=x,
    )
    assert [each.replicas for each in found] == [{*range(replicas)}]


def test_a_line_that_lockstep_runs_once_is_of_all_replicas(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def shown(model: Any, x: Tensor) -> Tensor:
        print(x)
        return x + 1

    (read,) = read_by(shown, execution="lockstep", replicas=4)
    assert (list(read.ways), read.replicas) == (["printing"], {0, 1, 2, 3})


def test_replicas_that_do_not_read_are_not_named() -> None:
    def branching(model: Any, x: Tensor) -> Any:
        if x[0, 0] > 2:
            return x * x[0, 0].item()
        return x

    first, second = read_by(branching)
    assert (first.replicas, second.replicas) == ({0, 1}, {1})


def test_helpers_and_libraries_that_read_are_called_by_a_line() -> None:
    def spread(x: Tensor) -> float:
        return float(np.ptp(np.asarray(x.detach())))

    (read,) = read_by(lambda model, x: x * spread(x))
    assert int(read.site.rpartition(":")[2]) == spread.__code__.co_firstlineno + 1


def test_the_result_of_an_autograd_function_is_read() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return 2 * gradients[0]

    def function(model: Any, x: Tensor) -> Any:
        return x * Double.apply(model.weight)[0].item()

    assert [list(each.ways) for each in read_by(function)] == [["Tensor.item()"]]


# ---------------------------------------------------------------- what does not


def constants(model: Any, x: Tensor) -> Any:
    steps = torch.arange(3) + 1
    if steps.sum() > 2 and steps.tolist():
        return x * int(steps[-1]) * model.table[0].item() * np.asarray(model.table)[1]
    return x


def sizes(model: Any, x: Tensor) -> Any:
    rows = torch.zeros(x.shape[0], len(x)) + x.numel() + x.dim()
    return x.reshape(-1, x.size(1)).expand(*x.shape) + rows.sum().item()


def indices(model: Any, x: Tensor) -> Any:
    order = x[:, 0].argsort()
    one = torch.zeros_like(x, dtype=torch.long)[:, :1]
    return torch.where(x > 1, x[order], x.gather(1, one)) + model.table[order.remainder(2)][:, None]


def kept(model: Any, x: Tensor) -> Any:
    model.kept.append(x.shape)
    assert x.is_floating_point() and isinstance(x, Tensor) and x.dtype != torch.bool
    return x.to("cpu")


def branches(model: Any, x: Tensor) -> Any:
    (y,) = poptorch.for_loop(2, lambda x: x + 1, [x])
    (y,) = poptorch.cond(x.sum() > 0, lambda y: y + 1, [y], lambda y: -y, [y])
    return poptorch.ipu_print_tensor(y)


def on_the_host(model: Any, x: Tensor) -> Any:
    cpu = poptorch.CPU(lambda x: torch.tensor(sorted(x.flatten().tolist())).view_as(x), "sorted")
    return cpu(x) + 1


SILENT = (constants, sizes, indices, kept, branches, on_the_host)


@pytest.mark.parametrize("execution", ["threads", None])
@pytest.mark.parametrize("function", SILENT, ids=lambda function: function.__name__)
def test_what_an_ipu_can_do_is_not_named(
    function: Callable[[Any, Tensor], Tensor], execution: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert read_by(function, execution=execution) == []


def test_layers_of_torch_are_not_named() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    layers = nn.Sequential(nn.Embedding(8, 4), layer, nn.LayerNorm(4), nn.GRU(4, 4))
    norm = nn.BatchNorm1d(4)

    def function(model: Any, x: Tensor) -> Any:
        hidden, _ = layers(x.int())
        return norm(hidden.sum(1)).softmax(-1) * model.weight.sum()

    options = poptorch.Options().replicationFactor(2).broadcastBuffers(False)
    model = Model(function, trained=True)
    model.layers, model.norm = layers, norm
    executor = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), 0.1))
    with listening() as reads:
        _, loss = executor(X.remainder(8))
        print(loss.tolist(), float(model.weight.detach()[0]))  # outside of forward
    executor.destroy()
    assert [*reads] == []


# ---------------------------------------------------------------- the command


def test_without_the_check_nobody_listens() -> None:
    assert listener() is None
    with listening() as reads:
        assert listener() is reads
    assert listener() is None


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("raise SystemExit(3)", 3, "check: no findings"),
        ("raise SystemExit", None, "check: no findings"),
        ("1 / 0", 1, "check: no findings"),
        (None, 2, "can't open file"),
    ],
)
def test_the_programs_own_end_stays(
    text: str | None,
    code: int | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "program.py"
    if text is not None:
        path.write_text(text)
    assert end_of(["run", "--check", str(path)], monkeypatch) == (code or 0)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("text", "code"), [("raise SystemExit(0)", 1), ("raise SystemExit(5)", 5)])
def test_findings_make_the_code_1_only_of_a_program_that_ends_well(
    text: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And the report switches the check on."""
    path = tmp_path / "program.py"
    path.write_text(
        "from gpusim.recording.reads import listener\n"
        "listener().add('m.py:1', 'int64[2]', 'int()', 'the forward of M', [0, 1, 2, 5])\n" + text
    )
    assert end_of(["run", "--check-report", "-", str(path)], monkeypatch) == code
    out, err = capsys.readouterr()
    assert f"gpusim run: check: 1 finding\n{KIND} at m.py:1, replicas 0 to 2, 5\n" in err
    assert f'"kind": "{KIND}"' in out and '"site": "m.py:1"' in out


def end_of(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The exit code of `gpusim` in this process."""
    monkeypatch.setattr("gpusim.tools.run.hub", _no_hub)
    monkeypatch.setattr(sys, "argv", ["gpusim"])
    monkeypatch.setattr(sys, "path", sys.path[:])
    main = sys.modules["__main__"]
    try:
        return cli.main(words)
    except SystemExit as ended:
        return ended.code or 0
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _no_hub(*given: Any) -> Iterator[None]:
    yield
