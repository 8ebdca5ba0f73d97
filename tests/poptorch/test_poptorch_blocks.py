"""Blocks: which operations are in them, and that results do not change."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpusim import poptorch
from gpusim.poptorch import AutoStage, Error, Liveness, Options, blocks
from gpusim.poptorch.blocks import (
    BeginBlock,
    Block,
    BlockFunction,
    LegacyBeginBlockFn,
    module_repr,
    removeBlocks,
)
from tests.poptorch.blocks_models import (
    Layers,
    Strategy,
    compiled,
    in_blocks,
    message,
    places,
    plan,
)

pytestmark = pytest.mark.usefixtures("ended")


# ---------------------------------------------------------------- results do not depend on them


class Transformer(nn.Module):
    """A small one, with dropout, in four parts."""

    def __init__(self, enter: Callable[[str], Any]) -> None:
        super().__init__()
        self.enter = enter
        self.embed = nn.Embedding(11, 8)
        self.first = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.second = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        with self.enter("embed"):
            x = self.embed(tokens)
        with self.enter("first"):
            x = self.first(x)
        with self.enter("second"):
            x = self.second(x)
        with self.enter("head"):
            logits = self.head(x.mean(dim=1))
            return logits, functional.cross_entropy(logits, labels)


PARTS = ("embed", "first", "second", "head")
BATCHES = 7 * 2 * 2


def trained(
    enter: Callable[[str], Any],
    strategy: Strategy = None,
    annotate: Callable[[Transformer], None] = lambda model: None,
    threads: bool = False,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The weights after two calls, on two replicas, and what the calls returned."""
    torch.manual_seed(3)
    model = Transformer(enter)
    annotate(model)
    options = Options().replicationFactor(2).randomSeed(5).autoRoundNumIPUs(True)
    options.Training.gradientAccumulation(7)
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    if threads:
        options._Popart.set("gpusim.execution", "threads")
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01)
    train = poptorch.trainingModel(model, options, optimizer)
    generator = torch.Generator().manual_seed(1)
    returned = []
    for _ in range(2):
        tokens = torch.randint(11, (BATCHES, 6), generator=generator, dtype=torch.int32)
        labels = torch.randint(5, (BATCHES,), generator=generator, dtype=torch.int32)
        returned += train(tokens, labels)
    train.destroy()
    return {name: value.clone() for name, value in model.state_dict().items()}, returned


@functools.cache
def plain(threads: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What `trained` gives without blocks; the last digits depend on how replicas run."""
    return trained(lambda name: contextlib.nullcontext(), threads=threads)


def on(ipus: tuple[int, ...]) -> Callable[[str], Block]:
    return lambda name: Block(name, ipus[PARTS.index(name)])


def annotated(model: Transformer) -> None:
    for ipu, name in enumerate(PARTS):
        BeginBlock(getattr(model, name), name, ipu_id=ipu)


def parallel_phases() -> Strategy:
    strategy = poptorch.ParallelPhasedExecution(*PARTS)
    for number in range(4):
        strategy.phase(number).ipus(number % 2)
    return strategy.sendTensorsOffChipAfterFwd()


def serial_phases() -> Strategy:
    strategy = poptorch.SerialPhasedExecution(["embed", "first"], ["second", "head"])
    for number in range(2):
        strategy.phase(number).ipus(0)
    return strategy.setTensorsLiveness(Liveness.OffChipAfterEachPhase).useSeparateBackwardPhase()


VERSIONS: dict[str, tuple[Any, ...]] = {
    "pipelined": (on((0, 1, 2, 3)), None),
    "pipelined there and back": (
        on((0, 1, 0, 0)),
        poptorch.PipelinedExecution(AutoStage.AutoIncrement),
    ),
    "pipelined by stages": (
        Block,
        poptorch.PipelinedExecution(["embed", "first"], "second", "head"),
    ),
    "sharded": (on((0, 1, 0, 1)), poptorch.ShardedExecution(AutoStage.AutoIncrement)),
    "serial phases": (Block, serial_phases()),
    "parallel phases": (Block, parallel_phases()),
    "modules": (lambda name: contextlib.nullcontext(), None, annotated),
    "one by one": (on((0, 1, 2, 3)), None, lambda model: None, True),
}  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_a_model_in_blocks_trains_to_the_weights_of_the_plain_one(version: str) -> None:
    weights, returned = trained(*VERSIONS[version])
    expected_weights, expected = plain(threads=version == "one by one")
    assert weights.keys() == expected_weights.keys()
    for name, value in weights.items():
        assert value.numpy().tobytes() == expected_weights[name].numpy().tobytes(), name
    for one, other in zip(returned, expected, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


def test_blocks_do_nothing_outside_of_a_compilation() -> None:
    model = in_blocks(("A", 0), ("A", 1), (None, None))  # no strategy would take them
    assert model(torch.ones(2, 4)).shape == (2, 4)
    Block.start("A", 77)
    Block.useAutoId()


# ---------------------------------------------------------------- Block


def test_a_block_puts_what_is_inside_on_its_ipu() -> None:
    model = in_blocks(("A", 0), ("B", 1), ("C", 3))
    assert places(model) == [("A", 0, 0), ("B", 1, 1), ("C", 3, 3)]
    assert places(model, threads=True, replicas=2) == [("A", 0, 0), ("B", 1, 1), ("C", 3, 3)]


def test_a_model_without_blocks_is_on_ipu_0() -> None:
    found = plan(Layers(3))
    assert {one.place for one in found.operations} == {found.operations[0].place}
    assert (found.ipus, found.pipeline_stages, found.pipelined) == (1, 1, False)


def test_what_runs_before_the_first_block_is_on_ipu_0() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        x = model.layers[0](x)
        with Block("B", 1):
            return model.layers[1](x)

    assert places(Layers(2, run)) == [("", 0, 0), ("B", 1, 1)]


@pytest.mark.parametrize("threads", [False, True])
def test_an_operation_after_a_block_is_in_none(threads: bool) -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        with Block("A", 0):
            x = model.layers[0](x)
        return x * 4

    with pytest.raises(Error, match=message("No active Block, all the ops must belong to a Block")):
        compiled(Layers(1, run), threads=threads)


@pytest.mark.parametrize(
    "after",
    [
        lambda x: functional.relu(x, inplace=True),
        lambda x: x.add_(1),
        lambda x: x.view(-1),
        lambda x: x + torch.rand(4),
        lambda x: x.__setitem__(0, 1.0) or x,
        lambda x: (x.half(), x)[1],
        lambda x: poptorch.identity_loss(x, "none"),
    ],
)
def test_whatever_computes_is_an_operation(after: Callable[[Tensor], Tensor]) -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        with Block("A", 0):
            x = x * 2
        return after(x)

    with pytest.raises(Error, match="No active Block"):
        compiled(Layers(0, run))


@pytest.mark.parametrize(
    "after",
    [
        lambda x: x.detach(),
        lambda x: x.contiguous(),
        lambda x: x.float(),
        lambda x: (x, torch.zeros(3))[0],  # a constant
        lambda x: x if x.shape[0] == x.size(0) and x.dtype == torch.float32 else x + 1,
    ],
)
def test_what_computes_nothing_is_none(after: Callable[[Tensor], Tensor]) -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        with Block("A", 0):
            x = x * 2
        return after(x)

    assert places(Layers(0, run)) == [("A", 0, 0)]


def test_a_block_inside_a_block_ends_both() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        with Block("A", 0):
            with Block("B", 1):
                x = x * 2
            return x * 3

    with pytest.raises(Error, match="No active Block"):
        compiled(Layers(0, run))


def test_started_blocks_go_on_until_the_next() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        Block.start(ipu_id=0)
        x = x * 2
        Block.start(user_id="next", ipu_id=1)
        return (x * 3) * 4

    assert places(Layers(0, run)) == [("0", 0, 0), ("next", 1, 1), ("next", 1, 1)]


def test_a_block_may_be_an_attribute_and_leaves_no_trace_in_the_state() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block("A", ipu_id=1)
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with self.block:
                x = self.layer(x)
            with self.block:
                return self.layer(x)

    model = Model()
    assert set(model.state_dict()) == {"layer.weight", "layer.bias"}
    assert repr(model.block) == "Block(user_id='A', ipu_id=1)"
    assert places(model) == [("A", 1, 1), ("A", 1, 1)]


def test_blocks_without_names_are_counted() -> None:
    blocks = ((None, 0), ("special", 1), (None, 2))
    assert places(in_blocks(*blocks)) == [("0", 0, 0), ("special", 1, 1), ("1", 2, 2)]


def test_counting_begins_anew_with_useAutoId_and_each_compilation() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            Block.useAutoId()
            with Block(ipu_id=0):
                x = x * 2
            with Block(ipu_id=0):
                x = x * 2
        return x

    executor = compiled(Layers(0, run))
    for _ in range(2):
        assert executor._executable is not None
        found = [one.place.block for one in executor._executable.plan.operations]
        assert found == ["0", "1", "0", "1"]
        executor.destroy()
        executor.compile(torch.ones(8, 4))


def test_a_number_is_as_its_digits() -> None:
    model = in_blocks((0, None), (1, None))
    assert places(model, poptorch.PipelinedExecution("0", "1")) == [("0", 0, 0), ("1", 1, 1)]


def test_a_block_function_is_a_block() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x), by=3)

        @BlockFunction("first", ipu_id=0)
        def first(self, x: Tensor) -> Tensor:
            """Doubles."""
            return x * 2

        @BlockFunction(ipu_id=1)
        def second(self, x: Tensor, *, by: int) -> Tensor:
            return x * by

    assert Model.first.__doc__ == "Doubles."
    assert places(Model()) == [("first", 0, 0), ("0", 1, 1)]


@pytest.mark.parametrize(
    "name", ["BeginBlock", "Block", "BlockFunction", "LegacyBeginBlockFn", "removeBlocks"]
)
def test_the_names_are_poptorchs_and_of_its_ops(name: str) -> None:
    assert getattr(poptorch, name) is getattr(poptorch.ops, name) is getattr(blocks, name)


# ---------------------------------------------------------------- BeginBlock


class Nested(nn.Module):
    """Two parts of three layers each."""

    def __init__(self) -> None:
        super().__init__()
        self.b1 = nn.Sequential(nn.ReLU(), nn.Tanh(), nn.ReLU())
        self.b2 = nn.Sequential(nn.ReLU(), nn.Tanh(), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.b2(self.b1(x))


@pytest.mark.parametrize(
    ("begin", "expected"),
    [
        ([], [0, 0, 0, 0, 0, 0]),
        (["b1"], [1, 1, 1, 1, 1, 1]),
        (["b2"], [0, 0, 0, 1, 1, 1]),
        (["b1.1", "b2"], [0, 1, 1, 2, 2, 2]),
        (["b1.0", "b1.1", "b1.2", "b2.0", "b2.1", "b2.2"], [1, 2, 3, 4, 5, 6]),
        (["b1", "b1.2", "b2.2"], [1, 1, 2, 2, 2, 3]),
        (["", "b2.1"], [1, 1, 1, 1, 2, 2]),
    ],
)
def test_a_module_begins_a_block_that_goes_on_until_the_next(
    begin: list[str], expected: list[int]
) -> None:
    model = Nested()
    for ipu, name in enumerate(begin, 1):
        BeginBlock(layer_to_call=model.get_submodule(name), user_id=f"of {name}", ipu_id=ipu)
    assert [ipu for _, _, ipu in places(model)] == expected
    assert [block for block, _, ipu in places(model) if ipu] == [
        f"of {begin[ipu - 1]}" for ipu in expected if ipu
    ]


def test_a_module_that_runs_twice_is_one_block() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = BeginBlock(nn.ReLU(), ipu_id=0), BeginBlock(nn.Tanh(), ipu_id=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(self.other(self.one(x)))

    strategy = poptorch.ShardedExecution()
    assert places(Model(), strategy) == [("0", 0, 0), ("1", 1, 1), ("0", 0, 0)]


def test_modules_that_begin_blocks_take_keyword_arguments() -> None:
    class Scale(nn.Module):
        def forward(self, x: Tensor, *, by: float) -> Tensor:
            return x * by

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = BeginBlock(Scale(), "scale", 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale(x, by=2.0)

    assert places(Model()) == [("scale", 1, 1)]


def test_a_function_is_wrapped() -> None:
    def double(x: Tensor, *, more: float = 0.0) -> Tensor:
        return 2 * x + more

    block = BeginBlock(double, "double", 1)
    assert isinstance(block, LegacyBeginBlockFn)
    assert block(torch.ones(1), more=1.0).item() == 3
    found = places(Layers(0, lambda model, x: block(x, more=0.5)))
    assert found == [("double", 1, 1), ("double", 1, 1)]


def test_begin_block_changes_neither_class_nor_state() -> None:
    model = Layers(2)
    before = model.state_dict()
    assert BeginBlock(model.layers[0], "A", 0) is model.layers[0]
    assert type(model.layers[0]) is nn.Linear
    assert model.state_dict().keys() == before.keys()
    model.load_state_dict(before, strict=True)
    assert repr(model.layers[0]) == repr(nn.Linear(4, 4))


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: torch.load(saved(model), weights_only=False),
    ],
)
def test_copies_and_pickles_have_the_blocks(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(BeginBlock(nn.ReLU(), "A", 1), BeginBlock(nn.Tanh(), "B", 2))
    assert places(copied(model)) == [("A", 1, 1), ("B", 2, 2)]


def saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_blocks_that_are_removed_may_begin_again() -> None:
    model = Nested()
    BeginBlock(model.b1[1], ipu_id=1)
    BeginBlock(model.b2, ipu_id=2)
    kept = model.b2.register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(Error, match="module has already been assigned to a block"):
        BeginBlock(model.b2, ipu_id=1)
    assert plan(model).ipus == 3
    removeBlocks(model)
    assert plan(model).ipus == 1
    assert list(model.b2._forward_pre_hooks) == [kept.id]
    BeginBlock(model.b2, ipu_id=1)
    assert plan(model).ipus == 2


def test_what_is_no_module_begins_no_block() -> None:
    text = "'poptorch_py_error': module is not an instance of torch.nn.Module or function."
    with pytest.raises(Error, match=re.escape(text)):
        BeginBlock(3)
    with pytest.raises(AssertionError, match=r"module: expected a torch\.nn\.Module"):
        removeBlocks(3)


def test_models_are_shown_with_their_blocks() -> None:
    model = Nested()
    assert module_repr(model) == repr(model)
    BeginBlock(model.b1[1], ipu_id=1)
    BeginBlock(model.b2, "B", ipu_id=2)
    assert module_repr(model).splitlines() == [
        "Nested(",
        "  (b1): Sequential(",
        "    (0): ReLU()",
        "    (1): BeginBlock(user_id=None, ipu_id=1): Tanh()",
        "    (2): ReLU()",
        "  )",
        "  (b2): BeginBlock(user_id=B, ipu_id=2): Sequential(",
        "    (0): ReLU()",
        "    (1): Tanh()",
        "    (2): ReLU()",
        "  )",
        ")",
    ]
    plan(model)
    assert "user_id=None" in module_repr(model)  # compiling numbers blocks, and keeps no number


def test_an_executor_is_shown_with_its_blocks() -> None:
    model = nn.Sequential(nn.ReLU(), BeginBlock(nn.Tanh(), "B", ipu_id=1))
    executor = poptorch.inferenceModel(model)
    assert repr(executor) == module_repr(model)
    assert "BeginBlock(user_id=B, ipu_id=1): Tanh()" in repr(executor)
