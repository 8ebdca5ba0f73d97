"""The code examples of PopTorch's and PopXL's API documentation run, and do what it says of them.

Where the documentation shows only a fragment, the least is around it that makes a program.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpusim import popdist, poptorch, popxl

X = torch.arange(8.0).reshape(2, 4)


class Model(nn.Module):
    """A model whose forward is a function of itself and the input."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.of, self.layers = forward, nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> Any:
        return self.of(self.layers, x)


def infer(model: nn.Module, x: Tensor, options: poptorch.Options | None = None) -> Any:
    executor = poptorch.inferenceModel(model, options)
    result = executor(x)
    executor.destroy()
    return result


def train(model: nn.Module, x: Tensor, options: poptorch.Options | None = None) -> Any:
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, options, optimizer)
    result = executor(x)
    executor.destroy()
    return result


# ---------------------------------------------------------------- options


def test_options() -> None:
    opts = poptorch.Options()
    opts.deviceIterations(10)
    opts.Training.gradientAccumulation(4)
    opts.connectionType(poptorch.ConnectionType.OnDemand)
    opts.outputMode(poptorch.OutputMode.All)
    opts.outputMode(poptorch.OutputMode.EveryN, 10)
    opts.Distributed.configureProcessId(0, 2)
    opts.Precision.enableFloatingPointExceptions(True)
    opts.TensorLocations.setActivationLocation(
        poptorch.TensorLocationSettings().useOnChipStorage(False)
    )
    opts.TensorLocations.setOptimizerLocation(
        poptorch.TensorLocationSettings().useOnChipStorage(False)
    )
    opts.setAvailableMemoryProportion({"IPU0": 0.5})
    assert (opts.device_iterations, opts.Training.gradient_accumulation) == (10, 4)
    assert (opts.Distributed.processId, opts.Distributed.numProcesses) == (0, 2)
    assert (opts.output_mode, opts.output_return_period) == (poptorch.OutputMode.EveryN, 10)


def test_an_option_that_is_about_to_be_removed() -> None:
    """Its example sets True, which PopTorch 3.3 itself refuses."""
    assert not poptorch.Options().Jit.traceModel(False).trace_model
    with pytest.raises(ValueError, match="is no longer supported"):
        poptorch.Options().Jit.traceModel(True)


def test_options_from_a_file(tmp_path: Path) -> None:
    config = tmp_path / "poptorch.conf"
    config.write_text("deviceIterations(1)\nsetExecutionStrategy(poptorch.ShardedExecution())\n")
    opts = poptorch.Options().deviceIterations(7)
    opts.loadFromFile(str(config))
    assert opts.device_iterations == 1


def test_processes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZE_OF_MINE", "4")
    monkeypatch.setenv("RANK_OF_MINE", "3")
    opts = poptorch.Options()
    opts.Distributed.setEnvVarNames("SIZE_OF_MINE", "RANK_OF_MINE")
    assert (opts.Distributed.numProcesses, opts.Distributed.processId) == (4, 3)


@pytest.mark.parametrize("scoped", [True, False])
def test_names_of_a_group_norm(scoped: bool) -> None:
    opts = poptorch.Options()
    if not scoped:
        opts.disableModuleNamescope()
    model = Model(lambda own, x: own["gn"](x), gn=nn.GroupNorm(2, 4))
    torch.testing.assert_close(infer(model, X, opts), model(X))


# ---------------------------------------------------------------- operations


def test_a_profiling_channel() -> None:
    class Mine:
        def first(self) -> str:
            return "first"

        def second(self) -> str:
            return "second"

    mine = Mine()
    channel = poptorch.profiling.Channel("MyApp")
    with channel.tracepoint("TimeThis"):
        pass
    channel.instrument(mine, "first", "second")
    assert (mine.first(), mine.second()) == ("first", "second")


def test_print_tensor_and_its_gradient(capfd: pytest.CaptureFixture[str]) -> None:
    def forward(own: Any, x: Tensor) -> Tensor:
        a = own["linear"](x) + 1
        printed = poptorch.ipu_print_tensor(a, "summation")
        return poptorch.identity_loss(printed * 2, "sum")

    train(Model(forward, linear=nn.Linear(4, 2)), X)
    printed = "".join(capfd.readouterr())
    assert "summation" in printed and "summation_gradient" in printed


def test_print_without_a_title(capfd: pytest.CaptureFixture[str]) -> None:
    assert torch.equal(infer(Model(lambda own, x: poptorch.ipu_print_tensor(x + x) + x), X), 3 * X)
    assert "14" in "".join(capfd.readouterr())


def test_multi_conv_and_a_name_scope() -> None:
    def forward(own: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        with poptorch.MultiConv().planType(poptorch.MultiConvPlanType.Parallel):
            y = own["convA"](x)
            v = own["convB"](x)
        with poptorch.NameScope("CustomString"):
            z = torch.relu(y)
        return z, v

    model = Model(forward, convA=nn.Conv2d(1, 2, 3), convB=nn.Conv2d(1, 1, 2))
    x = torch.randn(1, 1, 5, 5)
    for found, expected in zip(
        infer(model, x),
        (torch.relu(model.layers["convA"](x)), model.layers["convB"](x)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_an_operation_on_the_cpu() -> None:
    class OnCpu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cpu = poptorch.CPU(self.myCpuOp, "MyCPUOp")

        def myCpuOp(self, x: Tensor) -> Tensor:
            return x * 2.0

        def forward(self, x: Tensor) -> Tensor:
            out = self.cpu(x)
            out = self.cpu(out)
            return self.cpu(out)

    assert torch.equal(infer(OnCpu(), X), 8 * X)


def test_available_memory_of_a_convolution() -> None:
    class BasicNetwork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            out = self.conv(x)
            return poptorch.set_available_memory(out, 0.2)

    model, x = BasicNetwork(), torch.randn(1, 4, 7, 7)
    torch.testing.assert_close(infer(model, x), model.conv(x))


def test_a_loop() -> None:
    def body(x: Tensor) -> Tensor:
        return x * 2

    assert torch.equal(
        infer(Model(lambda own, x: poptorch.for_loop(10, body, [x])[0]), X), X * 1024
    )


def test_where_a_model_runs() -> None:
    def forward(own: Any, x: Tensor) -> Tensor:
        return x + 1 if poptorch.isRunningOnIpu() else x - 1

    model = Model(forward)
    assert torch.equal(infer(model, X), X + 1)
    assert torch.equal(model(X), X - 1)


def test_export_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    linear = nn.Linear(4, 2)
    model = poptorch.inferenceModel(linear)
    model.compileAndExport("my_model.poptorch", X)
    model.destroy()
    loaded = poptorch.load("my_model.poptorch")
    torch.testing.assert_close(loaded(X), linear(X))
    loaded.destroy()


def test_attributes_of_an_optimizer() -> None:
    opt = poptorch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.01)
    assert not opt.variable_attrs.isConstant("lr")
    opt.variable_attrs.markAsConstant("lr")
    assert opt.variable_attrs.isConstant("lr")


# ---------------------------------------------------------------- parallel execution


def named(*blocks: str | int | None) -> Model:
    """A linear layer in each of these blocks: names, IPUs, or neither."""
    layers = {f"layer{number}": nn.Linear(4, 4) for number in range(len(blocks))}

    def forward(own: Any, x: Tensor) -> Tensor:
        if None in blocks:
            poptorch.Block.useAutoId()
        loss = x
        for layer, block in zip(own.values(), blocks, strict=True):
            place = {"ipu_id": block} if isinstance(block, int) else {"user_id": block}
            with poptorch.Block(**place):  # the loss has to be in one too: it is in the last
                x = layer(x)
                loss = poptorch.identity_loss(x, "mean") if layer is [*own.values()][-1] else x
        return loss

    return Model(forward, **layers)


def phases(kind: Any, names: list[list[str]], ipus: list[tuple[int, int]]) -> Any:
    strategy = kind([poptorch.Phase(*(poptorch.Stage(name) for name in row)) for row in names])
    for number, places in enumerate(ipus):
        strategy.phase(number).ipus(*places)
    return strategy


SERIAL = phases(
    poptorch.SerialPhasedExecution, [["A", "A2"], ["B", "B2"], ["C", "C2"]], [(0, 1)] * 3
)
PARALLEL = phases(
    poptorch.ParallelPhasedExecution, [["0", "1"], ["2", "3"], ["4", "5"]], [(0, 2), (1, 3), (0, 2)]
)


@pytest.mark.parametrize(
    ("blocks", "strategy"),
    [
        ((0, 1), poptorch.PipelinedExecution(poptorch.AutoStage.SameAsIpu)),
        ((0, 1, 0), poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)),
        ((0, 1, 2), poptorch.ShardedExecution()),
        (("A", "B", "C", "D"), poptorch.PipelinedExecution("A", "B", "C", "D")),
        (
            ("A", "B", "C", "D"),
            poptorch.PipelinedExecution(poptorch.Stage("A", "B"), poptorch.Stage("C", "D")),
        ),
        ((0, 1, 2, 3), poptorch.PipelinedExecution()),
        (("A", "A2", "B", "B2", "C", "C2"), SERIAL),
        ((None,) * 6, PARALLEL),
    ],
    ids=[
        "the same as the IPU",
        "one after the other",
        "sharded",
        "by name",
        "by stage",
        "by IPU",
        "serial phases",
        "parallel phases",
    ],
)
def test_strategies(blocks: tuple[str | int | None, ...], strategy: Any) -> None:
    opts = poptorch.Options().setExecutionStrategy(strategy).autoRoundNumIPUs(True)
    opts.Training.gradientAccumulation(8)
    model, x = named(*blocks), torch.randn(8 * 2, 4)
    expected = model(x[-2:])  # the loss of the last micro-batch, before the update
    torch.testing.assert_close(train(model, x, opts), expected)


def test_blocks_of_one_ipu_share_its_stage() -> None:
    """The third block runs with the first, and so it cannot use what the second computes."""

    def forward(own: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        with poptorch.Block(ipu_id=0):
            first = own["first"](x)
        with poptorch.Block(ipu_id=1):
            second = own["second"](first)
        with poptorch.Block(ipu_id=0):
            return second, own["third"](first)

    strategy = poptorch.PipelinedExecution(poptorch.AutoStage.SameAsIpu)
    opts = poptorch.Options().setExecutionStrategy(strategy).deviceIterations(2)
    layers = {name: nn.Linear(4, 4) for name in ("first", "second", "third")}
    model = Model(forward, **layers)
    for found, expected in zip(infer(model, X, opts), model(X), strict=True):
        torch.testing.assert_close(found, expected)
    opts = poptorch.Options().setExecutionStrategy(strategy).deviceIterations(2)
    with pytest.raises(poptorch.Error, match="Stages must ascend"):
        infer(named(0, 1, 0), X, opts)


def test_blocks() -> None:
    @poptorch.BlockFunction("Decoder", ipu_id=1)
    def decoder(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    def forward(own: Any, x: Tensor) -> Tensor:
        poptorch.Block.useAutoId()
        with poptorch.Block(ipu_id=0):
            x = own["a_layer"](x)
        with poptorch.Block("special_block", ipu_id=0):
            x = x + 1
        return decoder(own["last"], x)

    model = Model(forward, a_layer=nn.Linear(4, 4), last=nn.Linear(4, 4))
    poptorch.BeginBlock(model.layers["a_layer"], ipu_id=0)
    opts = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())
    found = infer(model, X, opts)
    poptorch.removeBlocks(model)
    torch.testing.assert_close(found, model(X))


def test_phases_of_stages_and_of_names() -> None:
    one = poptorch.Phase(poptorch.Stage("A").ipu(0))
    two = poptorch.Phase(poptorch.Stage("A").ipu(0), poptorch.Stage("B").ipu(1))
    both = poptorch.Phase("A", "B")  # one stage made of two blocks
    assert [len(phase.stages) for phase in (one, two, both)] == [1, 2, 1]


@pytest.mark.parametrize(
    ("kind", "size", "groups"),
    [
        (poptorch.CommGroupType.Consecutive, 2, [0, 0, 1, 1]),
        (poptorch.CommGroupType.Orthogonal, 2, [0, 1, 0, 1]),
        (poptorch.CommGroupType.NoGrouping, 0, [0, 1, 2, 3]),
        (poptorch.CommGroupType.All, 4, [0, 0, 0, 0]),
    ],
)
def test_groups_of_a_weight(kind: Any, size: int, groups: list[int]) -> None:
    """Replica r has the values of group groups[r]."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            count = max(groups) + 1
            shape = (count, 3) if count > 1 else (3,)
            self.weight = nn.Parameter(torch.arange(3.0 * count).reshape(shape))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight.sum()

    model = poptorch.inferenceModel(Sum(), poptorch.Options().replicationFactor(4))
    model.weight.replicaGrouping(kind, size, poptorch.VariableRetrievalMode.OnePerGroup)
    assert model(torch.ones(4)).tolist() == [3.0 + 9 * group for group in groups]
    model.destroy()


# ---------------------------------------------------------------- PopXL, PopDist


@pytest.mark.parametrize(
    ("stride", "size", "assignment"),
    [
        (1, 2, [0, 0, 1, 1, 2, 2, 3, 3]),
        (1, 4, [0, 0, 0, 0, 1, 1, 1, 1]),
        (2, 4, [0, 1, 0, 1, 0, 1, 0, 1]),
        (4, 2, [0, 1, 2, 3, 0, 1, 2, 3]),
    ],
)
def test_replica_groupings(stride: int, size: int, assignment: list[int]) -> None:
    assert popxl.Ir(8).replica_grouping(stride, size).assignment == assignment


def test_replica_groupings_from_assignments() -> None:
    assignment = [0, 0, 1, 1, 0, 0, 1, 1]
    assert popxl.Ir(8).replica_grouping_from_assignments(assignment).assignment == assignment


def test_host_transfers() -> None:
    """A stream of shape (2, 5) that is loaded 4 times takes a buffer of shape (4, 2, 5)."""
    ir = popxl.Ir()
    ir.num_host_transfers = 4
    with ir.main_graph, popxl.in_sequence():
        x, y = popxl.h2d_stream((2, 5), popxl.float32), popxl.d2h_stream((2, 5), popxl.float32)
        for _ in range(4):
            popxl.ops.host_store(y, popxl.ops.host_load(x) + 1)
    buffer = torch.arange(40.0).reshape(4, 2, 5).numpy()
    with popxl.Session(ir, "ipu_model") as session:
        assert (session.run({x: buffer})[y] == buffer + 1).all()


def test_functions_on_some_instances() -> None:
    assert popdist.execute_on_instances({0}, max, 1, 2) == 2
    assert not popdist.isPopdistEnvSet() and popdist.isUniformReplicasPerInstance()
    assert (popdist.getNumInstances(), popdist.getReplicaIndexOffset()) == (1, 0)
