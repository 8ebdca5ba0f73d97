"""Strategies: IPUs, stages, phases, micro-batches, misuse, the listing, and the picture."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpusim import poptorch
from gpusim.poptorch import AutoStage, Error, Liveness, Options, Phase, Stage
from gpusim.poptorch.blocks import Block, PlacementPlan, Recorder
from gpusim.poptorch.schedule import KINDS, PipelineStage, pipelined
from tests.poptorch.blocks_models import (
    Layers,
    Loss,
    Strategy,
    compiled,
    in_blocks,
    message,
    places,
    plan,
    train,
)

pytestmark = pytest.mark.usefixtures("ended")


# ---------------------------------------------------------------- stages


def test_a_stage_is_its_ipu_unless_said_otherwise() -> None:
    blocks = (("A", 0), ("B", 1), ("C", 1), ("D", 2))
    assert [stage for _, stage, _ in places(in_blocks(*blocks))] == [0, 1, 1, 2]


def test_stages_can_count_up_with_the_blocks() -> None:
    strategy = poptorch.PipelinedExecution(AutoStage.AutoIncrement)
    found = plan(in_blocks((None, 0), (None, 1), (None, 2), (None, 1)), strategy)
    assert [one.place.stage for one in found.operations] == [1, 2, 3, 4]
    assert [one.place.ipu for one in found.operations] == [0, 1, 2, 1]
    assert (found.ipus, found.pipeline_stages) == (3, 4)


@pytest.mark.parametrize("make", [poptorch.PipelinedExecution, poptorch.ShardedExecution])
def test_given_stages_say_the_ipu_before_the_block_and_before_their_number(
    make: Callable[..., Strategy],
) -> None:
    strategy = make("A", Stage("B", "C").ipu(3), ["D"])
    found = places(in_blocks(("A", 1), ("B", 2), ("C", None), ("D", None)), strategy)
    assert found == [("A", 0, 1), ("B", 1, 3), ("C", 1, 3), ("D", 2, 2)]


@pytest.mark.parametrize(
    ("ipus", "switches"),
    [((0,), 0), ((0, 0, 0), 0), ((0, 1), 1), ((0, 0, 1, 1), 1), ((0, 1, 0, 1), 3), ((2, 2, 1), 1)],
)
def test_there_are_as_many_stages_as_switches_of_the_ipu_and_one(
    ipus: tuple[int, ...], switches: int
) -> None:
    strategy = poptorch.PipelinedExecution(AutoStage.AutoIncrement)
    found = plan(in_blocks(*((None, ipu) for ipu in ipus)), strategy)
    assert found.pipeline_stages == switches + 1
    assert len(found.stages) == switches + 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.booleans())
@settings(max_examples=60, deadline=None)
def test_whatever_the_order_of_ipus_stages_are_switches_and_one(
    ipus: list[int], training: bool
) -> None:
    recorder = Recorder(poptorch.PipelinedExecution(AutoStage.AutoIncrement))
    x = torch.ones(1)
    for ipu in ipus:
        recorder.begin(None, ipu)
        x, before = -x, x
        recorder.record(torch.neg, [before], [x])
    options = Options().deviceIterations(17)
    options.Training.gradientAccumulation(17)
    count = sum(one != other for one, other in pairwise(ipus)) + 1
    found = PlacementPlan(recorder, options, training)
    assert found.pipeline_stages == (2 * count - 1 if training else count)
    assert found.schedule().steps == found.pipeline_stages
    assert found.ipus == max(ipus) + 1


def test_the_ipus_are_counted_up_to_the_highest_with_an_operation() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        with Block("A", 2):
            x = x * 2
        with Block("nothing", 5):
            return x

    assert plan(Layers(0, run)).ipus == 3


# ---------------------------------------------------------------- enough micro-batches


@pytest.mark.parametrize("count", [2, 3])
def test_training_needs_as_many_accumulations_as_stages_forward_and_backward(count: int) -> None:
    assert train(Loss(count), 2 * count - 1).pipeline_stages == 2 * count - 1
    text = (
        "poptorch.Options().Training.gradientAccumulation must be greater than or equal to the "
        f"number of pipeline stages ({2 * count - 1}) when using poptorch.PipelinedExecution. "
        f"Please note that a model with {count} pipeline stages in PopTorch will have an "
        f"additional {count - 1} stages when training."
    )
    with pytest.raises(Error, match=message(text, "poptorch_py_error")) as raised:
        train(Loss(count), 2 * count - 2)
    assert raised.value.message == text


@pytest.mark.parametrize("count", [2, 3])
def test_inference_needs_as_many_iterations_as_stages(count: int) -> None:
    model = in_blocks(*((None, ipu) for ipu in range(count)))
    assert plan(model, iterations=count).pipeline_stages == count
    text = (
        "poptorch.Options().deviceIterations must be greater than or equal to the number of "
        f"pipeline stages ({count}) when using PopTorch.PipelinedExecution."
    )
    with pytest.raises(Error, match=message(text, "poptorch_py_error")):
        plan(model, iterations=count - 1)


def test_the_number_of_ipus_is_checked_before_the_depth() -> None:
    model = in_blocks(*((None, ipu) for ipu in range(3)))
    options = Options().autoRoundNumIPUs(False)
    with pytest.raises(Error, match="autoRoundNumIPUs"):
        poptorch.inferenceModel(model, options)(torch.ones(1, 4))


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        (poptorch.PipelinedExecution(), True),
        (poptorch.ShardedExecution(), False),
        (poptorch.ParallelPhasedExecution(poptorch.Phase("A")), False),
    ],
)
def test_inference_accumulates_no_gradients(strategy: Strategy, more: bool) -> None:
    options = Options()
    options.setExecutionStrategy(strategy)
    options.Training.gradientAccumulation(2)
    with pytest.raises(Error, match="gradientAccumulation to 1 or leave it as its") as raised:
        poptorch.inferenceModel(Loss(1), options)
    assert ("deviceIterations to process a sufficient" in str(raised.value)) is more


def test_other_strategies_and_single_ipus_need_no_more_than_one() -> None:
    assert train(Loss(1), 1).pipeline_stages == 1
    assert train(Loss(3), 1, poptorch.ShardedExecution()).ipus == 3


# ---------------------------------------------------------------- misuse

SAME_AS_IPU = "poptorch.AutoStage.SameAsIpu was selected but no IPU was specified for block {}"


@pytest.mark.parametrize(
    ("blocks", "strategy", "text"),
    [
        ([("A", None)], poptorch.PipelinedExecution(), SAME_AS_IPU.format("A")),
        ([(None, None)], poptorch.ShardedExecution(), SAME_AS_IPU.format("0")),
        ([("A", 0), ("X", 0)], poptorch.PipelinedExecution("A", "B"),
         "Unknown Block 'X' list of expected Blocks: ['A', 'B']"),
        ([("X", 0)], poptorch.SerialPhasedExecution("A"),
         "Unknown Block 'X' list of expected Blocks: ['A']"),
        ([(None, 0)], poptorch.PipelinedExecution("A"),
         "Unknown Block '0' list of expected Blocks: ['A']"),
        ([(1.5, 0)], None, "user_id must be either a positive integer or a str"),
        ([(-1, 0)], None, "user_id must be either a positive integer or a str"),
        ([("A", -1)], None, "ipu_id must be either a positive integer or a int"),
        ([("A", "0")], None, "ipu_id must be either a positive integer or a int"),
        ([("A", True)], None, "ipu_id must be either a positive integer or a int"),
        ([("A", None)], poptorch.SerialPhasedExecution("A"),
         "No IPU was specified for block A: a stage of a phase needs one, of "
         "poptorch.Stage(...).ipu(...), of the phase's ipus(...), or of the block itself"),
    ],
)  # fmt: skip
def test_ids_that_a_strategy_cannot_place(blocks: Any, strategy: Strategy, text: str) -> None:
    with pytest.raises(AssertionError, match=f"^{re.escape(text)}$"):
        compiled(in_blocks(*blocks), strategy)


def test_a_stage_is_on_one_ipu() -> None:
    model = in_blocks(("A", 0), ("B", 1))
    strategy = poptorch.PipelinedExecution(Stage("A", "B"))
    text = (
        "Ops ['layers.0/linear:0', 'layers.1/linear:0'] have the same pipeline stage 0, but "
        "different virtual graph ids [0, 1]. All ops with the same pipeline stage must also have "
        "the same virtual graph id"
    )
    with pytest.raises(Error, match=message(text, "popart_exception")):
        compiled(model, strategy)
    assert plan(model, poptorch.ShardedExecution(Stage("A", "B"))).ipus == 2


def test_stages_ascend_along_the_model() -> None:
    model = in_blocks(("A", 0), ("B", 1), ("C", 0))
    text = (
        "The operation linear of stage 0 (block C) uses a result of stage 1 (block B), which runs "
        "after it. Stages must ascend in the order of the model; poptorch.AutoStage.AutoIncrement "
        "gives every block a stage of its own, in that order"
    )
    with pytest.raises(Error, match=message(text, "popart_exception")):
        compiled(model)
    increasing = poptorch.PipelinedExecution(AutoStage.AutoIncrement)
    assert plan(model, increasing).pipeline_stages == 3


def test_detached_results_are_results_too() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        with Block("A", 1):
            x = (x * 2).detach()
        with Block("B", 0):
            return x * 3

    with pytest.raises(Error, match=r"mul of stage 0 \(block B\) uses a result of stage 1"):
        compiled(Layers(0, run))


def test_a_block_may_be_entered_again_for_what_does_not_depend_on_later_ones() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        with Block("A", 0):
            one = x * 2
        with Block("B", 1):
            other = one * 3
        with Block("A", 0):
            more = one * 5
        with Block("B", 1):
            return other + more

    found = plan(Layers(0, run))
    assert [one.place.stage for one in found.operations] == [0, 1, 0, 1]
    assert found.pipeline_stages == 2


# ---------------------------------------------------------------- phases


def phases(strategy: Strategy) -> list[tuple[int, int]]:
    found = plan(in_blocks(("A", None), ("B", None), ("C", None)), strategy)
    return [(one.place.phase, one.place.ipu) for one in found.operations]


def on_ipus(strategy: Strategy, *ipus: int) -> Strategy:
    for number, ipu in enumerate(ipus):
        strategy.phase(number).ipus(ipu)
    return strategy


def test_parallel_phases_alternate_between_even_and_odd_ipus() -> None:
    own = on_ipus(poptorch.ParallelPhasedExecution("A", "B", "C"), 0, 1, 2)
    assert phases(own) == [(0, 0), (1, 1), (2, 2)]
    text = (
        "When phases are executed in parallel: even phases must run on even IPUs and odd phases on "
        "odd IPUs"
    )
    for ipus in ((1, 1, 0), (0, 0, 0), (0, 1, 1)):
        with pytest.raises(Error, match=message(text)):
            phases(on_ipus(poptorch.ParallelPhasedExecution("A", "B", "C"), *ipus))


def test_serial_phases_may_be_on_any_ipu() -> None:
    own = on_ipus(poptorch.SerialPhasedExecution("A", "B", "C"), 1, 1, 0)
    assert phases(own) == [(0, 1), (1, 1), (2, 0)]


@pytest.mark.parametrize(
    ("liveness", "numbers"),
    [
        (Liveness.AlwaysLive, [0, 1, 2]),
        (Liveness.OffChipAfterFwd, [0, 1, 2]),
        (Liveness.OffChipAfterFwdNoOverlap, [0, 2, 4]),
        (Liveness.OffChipAfterEachPhase, [0, 4, 8]),
    ],
)
def test_liveness_makes_room_for_loads_and_stores(liveness: Liveness, numbers: list[int]) -> None:
    own = on_ipus(poptorch.SerialPhasedExecution("A", "B", "C"), 0, 0, 0)
    assert [phase for phase, _ in phases(own.setTensorsLiveness(liveness))] == numbers
    parallel = on_ipus(poptorch.ParallelPhasedExecution("A", "B", "C"), 0, 1, 0)
    parallel._tensors_liveness = liveness  # there is no method that sets the last two
    if numbers[1] == 1:
        assert [phase for phase, _ in phases(parallel)] == numbers
    else:
        with pytest.raises(
            Error, match=message("This is only supported for serial phase execution")
        ):
            phases(parallel)


def test_phases_ascend_along_the_model() -> None:
    with pytest.raises(Error, match=r"of phase 0 \(block C\) uses a result of phase 1 \(block B\)"):
        phases(on_ipus(poptorch.SerialPhasedExecution(["A", "C"], "B"), 0, 0))


def test_the_stages_of_a_phase_are_on_different_ipus() -> None:
    strategy = poptorch.ParallelPhasedExecution(
        Phase(Stage("A").ipu(0), Stage("B").ipu(2)), Phase(Stage("C").ipu(1))
    )
    assert phases(strategy) == [(0, 0), (0, 2), (1, 1)]


# ---------------------------------------------------------------- the listing


@pytest.mark.parametrize(
    ("strategy", "pipelining", "lines"),
    [
        (poptorch.PipelinedExecution(), 1,
         ["mode(Pipelined), ipu(0), stage(0)", "mode(Pipelined), ipu(1), stage(1)"]),
        (poptorch.ShardedExecution(AutoStage.AutoIncrement), 0,
         ["mode(Sharded), ipu(0), stage(1)", "mode(Sharded), ipu(1), stage(2)"]),
        (poptorch.SerialPhasedExecution("A", "B"), 0,
         ["mode(Phased), ipu(0), phase(0)", "mode(Phased), ipu(1), phase(1)"]),
    ],
)  # fmt: skip
def test_operations_are_listed_with_their_places(
    strategy: Strategy, pipelining: int, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "poptorch::python")
    compiled(in_blocks(("A", 0), ("B", 1)), strategy)
    begin = caplog.messages.index("Graph lowered to PopART {")
    assert caplog.messages[begin - 1] == f"enablePipelining set to value {pipelining}"
    assert caplog.messages[begin + 1 : begin + 4] == [
        f"  linear was lowered to layers/{place}/Gemm:0 [float32(1, 4), {line}]"
        for place, line in enumerate(lines)
    ] + ["}"]


def test_operations_have_popArts_names() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(2 * x) * x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l1 = Inner()
            self.l2 = nn.Linear(5, 5, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            x = self.l2(self.l1(x))
            x.mul_(3)
            x = nn.functional.log_softmax(x * x, -1)
            return x.split([2, 3], -1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b1 = Outer()

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return tuple(-y for y in self.b1(x))

    model = poptorch.inferenceModel(Model())
    model.compile(torch.ones(2, 5))
    found = [re.sub(r".* lowered to (.*) \[float32.*", r"\1", line) for line in listing(model)]
    assert found == [
        *("b1/l1/Mul:0", "b1/l1/Relu:0", "b1/l1/Mul:0/1", "b1/l2/MatMul:0"),
        *("b1/Mul:0", "b1/Mul:0/1", "b1/LogSoftmax:0", "b1/Split:0, b1/Split:1"),
        *("Neg:0", "Neg:0/1"),
    ]
    place = "mode(Pipelined), ipu(0), stage(0)"
    assert listing(model)[0] == f"  mul was lowered to b1/l1/Mul:0 [float32(2, 5), {place}]"


def listing(model: poptorch.PoplarExecutor) -> list[str]:
    assert model._executable is not None
    return model._executable.plan.listing()


def test_results_without_a_name_and_empty_models_are_listed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        x = x * 2
        x[0] = 1.0
        return x

    line = plan(Layers(0, run)).listing()[-1]
    assert line == "  __setitem__ was lowered to __setitem__ [mode(Pipelined), ipu(0), stage(0)]"
    caplog.set_level(logging.INFO, "poptorch::python")
    plan(nn.Identity())
    text = "No IPUs are used by this model. This may happen if the model is trivial"
    assert text in caplog.messages


# ---------------------------------------------------------------- devices


def acquired(caplog: pytest.LogCaptureFixture) -> int:
    """How many IPUs the last executor has attached to."""
    found = re.findall(r"Acquired (\d+) IPU\(s\)", "\n".join(caplog.messages))
    return int(found[-1])


@pytest.mark.parametrize(
    ("ipus", "replicas", "count"),
    [((0,), 4, 4), ((0, 1), 1, 2), ((0, 1), 4, 8), ((3,), 2, 8), ((0, 2), 1, 4), ((0, 2), 3, 16)],
)
def test_a_model_attaches_to_its_ipus_times_its_replicas(
    ipus: tuple[int, ...], replicas: int, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "poptorch::python")
    compiled(in_blocks(*((None, ipu) for ipu in ipus)), replicas=replicas)
    assert acquired(caplog) == count  # rounded up to powers of two


def test_numbers_of_ipus_that_are_no_power_of_two_are_an_error_unless_rounded() -> None:
    model = in_blocks(("A", 0), ("B", 1), ("C", 2))
    executor = poptorch.inferenceModel(model, Options().deviceIterations(4))
    text = "The model specifies the use of 3 IPUs, however PopTorch must reserve a minimum of 4"
    with pytest.raises(Error, match=text):
        executor.compile(torch.ones(4, 4))
    assert not executor.isCompiled()


def test_too_many_ipus_are_an_error() -> None:
    with pytest.raises(Error, match=r"Too many IPUs requested \(96\)"):
        compiled(in_blocks(("A", 31)), replicas=3)


def test_a_chosen_device_has_to_have_the_ipus_of_the_blocks() -> None:
    options = Options().useIpuId(0).deviceIterations(2)
    executor = poptorch.inferenceModel(in_blocks(("A", 0), ("B", 1)), options)
    text = "Expected at least replication factor * used IPUs = 2 * 1 = 2 device Ids but the user "
    with pytest.raises(Error, match=re.escape(text + "provided 1")):
        executor.compile(torch.ones(2, 4))


# ---------------------------------------------------------------- the picture


def drawn(executor: poptorch.PoplarExecutor, path: Path, **how: Any) -> list[str]:
    """The ids and the texts of the boxes and labels of the picture."""
    figure = executor.schedulePlot(path, **how)
    assert type(figure).__name__ == "Figure"
    root = ElementTree.parse(path).getroot()
    ids = [node.get("id") or "" for node in root.iter() if (node.get("id") or "").count("-")]
    texts = ["".join(node.itertext()).strip() for node in root.iter() if node.tag.endswith("}text")]
    return [name for name in ids if name.split("-")[0] in KINDS] + texts


def test_the_picture_of_a_pipeline_names_its_blocks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = Options().deviceIterations(2)
    options.Training.gradientAccumulation(4)
    executor = poptorch.trainingModel(Loss(2), options)
    executor.compile(torch.ones(8, 4), torch.ones(8, 4))
    found = drawn(executor, tmp_path / "schedule.svg")
    boxes = {name for name in found if "-ipu" in name}
    assert boxes == {"update-ipu0", "update-ipu1"} | {
        f"{kind}-ipu{ipu}-stage{ipu}-microbatch{batch}"
        for kind in ("forward", "backward")
        for ipu in range(2)
        for batch in range(4)
    }
    text = "\n".join(found)
    assert "IPU 0: block 0" in text and "IPU 1: block 1" in text
    assert "Pipelined: 2 IPUs, 2 stages (3 with backward), 4 micro-batches" in text
    assert "Loss, one of 2 device iterations" in found
    table = pipelined([PipelineStage(0), PipelineStage(1)], 4)
    assert f"bubble {table.bubble:.0%} of the IPUs' time" in text
    assert "a backward pass: 1.5" in "\n".join(drawn(executor, tmp_path / "a.svg", backward=1.5))


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (poptorch.ShardedExecution(), "Sharded: 2 IPUs, 2 stages, 3 micro-batches"),
        (poptorch.SerialPhasedExecution("A", "B"),
         "Phased: 2 IPUs, 2 stages in 2 phases, 3 micro-batches"),
        (None, "Pipelined: 2 IPUs, 2 stages, 3 micro-batches"),
    ],
)  # fmt: skip
def test_other_strategies_have_pictures_too(strategy: Strategy, text: str, tmp_path: Path) -> None:
    executor = compiled(in_blocks(("A", 0), ("B", 1)), strategy, iterations=3)
    found = drawn(executor, tmp_path / "schedule.svg")
    assert text in "\n".join(found)
    assert {name.split("-")[0] for name in found if "-ipu" in name} == {"forward"}


def test_only_compiled_models_have_a_picture(tmp_path: Path) -> None:
    executor = poptorch.inferenceModel(nn.ReLU())
    with pytest.raises(Error, match="Model has not been compiled or has been destroyed"):
        executor.schedulePlot()
    executor.compile(torch.ones(1))
    assert executor.schedulePlot() is not None
    with pytest.raises(ValueError, match=r"expected a name that ends in \.svg"):
        executor.schedulePlot(tmp_path / "schedule.txt")
    with pytest.raises(ValueError, match="backward=0: expected a positive number"):
        executor.schedulePlot(backward=0)


def test_separate_backward_phases_are_counted(tmp_path: Path) -> None:
    for separate, phase_count in ((False, 3), (True, 4)):
        strategy = poptorch.SerialPhasedExecution("block 0", "block 1")
        strategy.useSeparateBackwardPhase(separate)
        assert train(Loss(2), 1, strategy).schedule().steps == phase_count
