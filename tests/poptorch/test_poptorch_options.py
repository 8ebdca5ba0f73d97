"""poptorch.Options: defaults, what each method sets, copies and strategies."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpusim import poptorch
from gpusim.poptorch import (
    AutoStage,
    CommGroupType,
    ConnectionType,
    HalfFloatCastingBehavior,
    Liveness,
    MeanReductionStrategy,
    Options,
    OutputMode,
    Phase,
    ReductionType,
    Stage,
    SyncPattern,
    TensorLocationSettings,
)
from gpusim.poptorch.options import BlockId, OptionsDict
from gpusim.poptorch.options.attribute import Attribute
from tests.oracles.machine_time import PATIENCE
from tests.poptorch.option_calls import METHODS, HalfType, call, group_of

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("single")
DEFAULTS = {
    "replication_factor": 1,
    "input_group_size": 1,
    "input_group_type": CommGroupType.Consecutive,
    "broadcast_buffers": True,
    "device_iterations": 1,
    "auto_round_num_ipus": False,
    "connection_type": ConnectionType.Always,
    "sync_pattern": SyncPattern.Full,
    "available_memory_proportion": {},
    "anchored_tensors": {},
    "output_mode": OutputMode.Default,
    "output_return_period": 1,
    "log_dir": ".",
    "max_repeat_logs": 4,
}
GROUP_DEFAULTS = {
    "Jit": {"trace_model": False},
    "Precision": {"half_float_casting": HalfFloatCastingBehavior.HalfUpcastToFloat},
    "Training": {
        "gradient_accumulation": 1,
        "accumulation_and_replication_reduction_type": ReductionType.Mean,
        "meanAccumulationAndReplicationReductionStrategy": MeanReductionStrategy.Post,
    },
    "Distributed": {
        "num_distributed_processes": 1,
        "distributed_process_id": 0,
        "ipuof_configs": {},
    },
    "TensorLocations": {},
}
POPART_DEFAULTS = {"instrumentWithHardwareCycleCounter": False, "rearrangeAnchorsOnHost": False}


def plain(options: Options) -> dict[str, Any]:
    """toDict without the bar, of options whose output mode is chosen."""
    found = options.clone()
    if found.defaultOutputMode():
        found.outputMode(OutputMode.All)
    return {k: v for k, v in found.toDict().items() if k != "compilation_progress_bar_fn"}


# ---------------------------------------------------------------- defaults and methods


@pytest.mark.parametrize("name", DEFAULTS)
def test_default(name: str) -> None:
    assert Options()(name) == getattr(Options(), name) == DEFAULTS[name]


@pytest.mark.parametrize("group", GROUP_DEFAULTS)
def test_defaults_of_groups(group: str) -> None:
    assert group_of(Options(), group).toDict() == GROUP_DEFAULTS[group]


def test_there_are_no_other_defaults() -> None:
    options = Options().outputMode(OutputMode.Final)
    found = plain(options)
    expected = {**DEFAULTS, "output_mode": 0, "execution_mode": 0, **POPART_DEFAULTS}
    for group in ("Training", "Distributed", "TensorLocations"):
        expected |= GROUP_DEFAULTS[group]
    assert found == expected
    assert options.toDict()["compilation_progress_bar_fn"].compilation_time is None


def test_instances_share_no_defaults() -> None:
    Options().anchorTensor("a", "b")
    Options()._Popart.set("x", 1)
    assert Options().anchored_tensors == {} and Options()._Popart.options == POPART_DEFAULTS


@pytest.mark.parametrize(("group", "method", "arguments", "expected"), METHODS)
def test_method_sets_and_chains(
    group: str, method: str, arguments: tuple[Any, ...], expected: dict[str, Any]
) -> None:
    options = Options()
    assert call(options, group, method, arguments) is group_of(options, group)
    for name, value in expected.items():
        popart = options._Popart.options
        found = popart[name] if name in popart else group_of(options, group)(name)
        assert found == value, name


@pytest.mark.parametrize(("group", "method", "arguments", "expected"), METHODS)
def test_what_is_set_is_in_the_dictionary_or_shown(
    group: str, method: str, arguments: tuple[Any, ...], expected: dict[str, Any]
) -> None:
    options = Options()
    call(options, group, method, arguments)
    found = plain(options)
    for name, value in expected.items():
        if name in found:
            assert found[name] == value
        elif not name.startswith(("processId", "numProcesses")):
            assert f"{name.lstrip('_')}=" in repr(options)


@pytest.mark.parametrize(("group", "method", "arguments", "expected"), METHODS)
def test_what_methods_set_is_valid(
    group: str, method: str, arguments: tuple[Any, ...], expected: dict[str, Any]
) -> None:
    options = Options()
    call(options, group, method, arguments)
    poptorch.poptorch_core._validateOptions(options.outputMode(OutputMode.All).toDict())


class Opaque:
    pass


UNKNOWN = [
    ("autoRecompute", 3, "Unknown integer option autoRecompute"),
    ("enableOutline", True, "Unknown bool option enableOutline"),
    ("thresholdOfOutlining", 0.5, "Unknown float option thresholdOfOutlining"),
    ("name", "x", "Unknown string option name"),
    ("dotCheck", {"Final"}, "Unknown list option dotCheck"),
    ("engineOption", {"a": "b"}, "Unknown dictionary option engineOption"),
    ("noSettings.enabled", True, "Unknown bool option noSettings.enabled"),
    ("autoRecomputation", None, "Unknown value type <class 'NoneType'> for option"),
    ("dotChecks", Opaque(), "Unknown value type <class .*Opaque'> for option dotChecks"),
]


@pytest.mark.parametrize(("name", "value", "message"), UNKNOWN, ids=[one[2] for one in UNKNOWN])
def test_unknown_options_of_popart(name: str, value: Any, message: str) -> None:
    options = Options().showCompilationProgressBar(False).outputMode(OutputMode.All)
    options._Popart.set(name, value)
    with pytest.raises(poptorch.Error, match=message):
        poptorch.poptorch_core._validateOptions(options.toDict())
    with pytest.raises(poptorch.Error, match=message):
        poptorch.inferenceModel(torch.nn.Identity(), options)(torch.ones(1))


def test_known_options_of_popart() -> None:
    options = Options().showCompilationProgressBar(False)
    values = {
        "accumulateOuterFragmentSettings.excludedVirtualGraphs": [0],
        "autoRecomputation": 3,
        "dotChecks": ["Final"],
        "hardwareInstrumentations": {0, 1},
        "outlineThreshold": 1.5,
        "saveInitializersToFile": "weights.onnx",
        "syntheticDataMode": 0,
    }
    for name, value in values.items():
        options._Popart.set(name, value)
    result = poptorch.inferenceModel(torch.nn.Identity(), options)(torch.ones(1))
    assert result.tolist() == [1]


def test_every_public_method_is_tested() -> None:
    tested = {(group, method) for group, method, *_ in METHODS}
    tested |= {("", "appendToLocationExcludes"), ("", "setExecutionStrategy")}
    general = {name for name, _ in inspect.getmembers(OptionsDict, callable)}
    general |= {"loadFromFile", "from_json", "clone", "defaultOutputMode", "merge"}
    for group in ("", "_Popart", *GROUP_DEFAULTS):
        for name, _ in inspect.getmembers(type(group_of(Options(), group)), callable):
            if not name.startswith("_") and name not in general - {"set"}:
                inherited = name == "set" and group != "_Popart"
                assert inherited or (group, name) in tested, (group, name)


def test_groups_merge_what_they_share() -> None:
    options = Options()
    options.Precision.setPartialsType(HalfType())
    options.Training.setConvolutionDithering(True)
    options._Popart.setEngineOptions({"a": "b"})
    options.enableProfiling()
    both = {"partialsType": "half", "enableConvDithering": True}
    assert options._Popart.options["convolutionOptions"] == both
    assert options._Popart.options["engineOptions"].items() >= {
        ("a", "b"),
        ("autoReport.all", "true"),
    }


def test_location_settings() -> None:
    settings = (
        TensorLocationSettings()
        .minElementsForOffChip(4)
        .minElementsForReplicatedTensorSharding(8)
        .useOnChipStorage()
        .useReplicatedTensorSharding(False)
        .useIOTilesToLoad()
        .useIOTilesToStore(False)
    )
    assert settings.toDict() == {
        "minElementsForOffChip": 4,
        "minElementsForReplicatedTensorSharding": 8,
        "onChip": 1,
        "useReplicatedTensorSharding": 0,
        "useIOTilesToLoad": 1,
        "useIOTilesToStore": 0,
    }
    assert not settings.useOnChipStorage(None).exists("onChip")


def test_excludes_are_added_to() -> None:
    before = Options()._source_location_excludes
    options = Options().appendToLocationExcludes("a", "b")
    assert options._source_location_excludes == [*before, "a", "b"]
    assert Options()._source_location_excludes == before


# ---------------------------------------------------------------- as values


methods = st.lists(st.sampled_from(METHODS), max_size=12)


def called(calls: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]]) -> Options:
    options = Options()
    for group, method, arguments, _ in calls:
        call(options, group, method, copy.deepcopy(arguments))
    return options


@given(methods)
def test_a_clone_is_equal_and_shares_nothing(calls: Any) -> None:
    options = called(calls)
    clone = options.clone()
    assert clone == options and repr(clone) == repr(options) and hash(clone) == hash(options)
    assert plain(clone) == plain(options)
    clone.anchorTensor("only", "here")
    clone._Popart.set("only", "here")
    clone.deviceIterations(options.device_iterations + 1)
    clone.setAvailableMemoryProportion({"IPU7": 0.1})
    assert options == called(calls) != clone


@given(methods, methods)
def test_options_are_equal_exactly_if_they_show_the_same(one: Any, other: Any) -> None:
    first, second = called(one), called(other)
    same = {n: v for n, v in vars(first).items() if n != "_is_frozen"} == {
        n: v for n, v in vars(second).items() if n != "_is_frozen"
    }
    assert (first == second) == same
    if first == second:
        assert plain(first) == plain(second)


def test_options_equal_only_their_kind() -> None:
    assert Options() != 1 and Options() != Options().Training and Options() == Options()
    assert Options().Jit != Options().TensorLocations


def test_options_can_be_keys() -> None:
    options = Options()
    found = {options: "here"}
    options.deviceIterations(7)
    assert found[options] == "here"


def test_repr_names_every_option_and_no_address() -> None:
    options = Options().replicationFactor(4)
    assert repr(options).startswith("Options(replication_factor=4, ")
    assert "gradient_accumulation=1" in repr(options) and "0x" not in repr(options)


def test_completion_offers_methods_groups_and_values() -> None:
    offered = dir(Options())
    assert {"deviceIterations", "device_iterations", "Training", "outputMode"} <= set(offered)
    assert "random_seed" in dir(Options().randomSeed(1))


def test_a_group_may_change_its_class() -> None:
    class Derived(poptorch.options._DistributedOptions):
        pass

    options = Options()
    options.Distributed.__class__ = Derived
    assert type(options.Distributed) is Derived and options.Distributed.processId == 0


def test_the_progress_bar_can_be_hidden() -> None:
    options = Options().outputMode(OutputMode.All).showCompilationProgressBar(False)
    assert "compilation_progress_bar_fn" not in options.toDict()


# ---------------------------------------------------------------- strategies


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (poptorch.PipelinedExecution(), {"execution_mode": 0}),
        (poptorch.ShardedExecution("a"), {"execution_mode": 1}),
        (
            poptorch.SerialPhasedExecution("a").setTensorsLiveness(Liveness.OffChipAfterEachPhase),
            {
                "execution_mode": 2,
                "separate_backward_phase": False,
                "tensors_liveness": 3,
                "serial_phases_execution": True,
            },
        ),
        (
            poptorch.ParallelPhasedExecution("a")
            .sendTensorsOffChipAfterFwd()
            .useSeparateBackwardPhase(),
            {
                "execution_mode": 2,
                "separate_backward_phase": True,
                "tensors_liveness": 1,
                "serial_phases_execution": False,
            },
        ),
    ],
)
def test_a_strategy_is_in_the_dictionary(strategy: Any, expected: dict[str, Any]) -> None:
    options = Options().outputMode(OutputMode.All).setExecutionStrategy(strategy)
    assert options.toDict().items() >= expected.items()
    assert options.clone() == options


def test_stages_of_a_pipeline_are_numbered_in_order() -> None:
    pipeline = poptorch.PipelinedExecution("a", ["b", "c"], Stage("d").ipu(0))
    assert [pipeline.stage(block)._stage_id for block in "abcd"] == [0, 1, 1, 2]
    assert pipeline.stage("c").blocks == ["b", "c"]


@pytest.mark.parametrize(
    "phases",
    [
        (Phase(Stage("a"), Stage("b")), Phase("c", "d")),
        ([Phase(Stage("a"), Stage("b")), Phase("c", "d")],),
        ([Stage("a"), Stage("b")], ["c", "d"]),
    ],
)
def test_phases_can_be_written_in_three_ways(phases: tuple[Any, ...]) -> None:
    strategy = poptorch.SerialPhasedExecution(*phases)
    strategy.phase(0).ipus(0, 1)
    assert [len(strategy.phase(i).stages) for i in (0, 1)] == [2, 1]
    assert [strategy.stage(block)._phase_id for block in "abcd"] == [0, 0, 1, 1]
    assert strategy.phase(0).stage(1)._ipu == 1


def entered(strategy: Any, *blocks: tuple[BlockId | None, int | None]) -> list[tuple[int, int]]:
    """The stage and the IPU of each block, entered in order."""
    manager = strategy._stages_manager
    begun = [manager.beginStage(block, ipu) for block, ipu in blocks]
    return [(stage._stage_id, ipu) for stage, ipu in begun]


def test_stages_found_by_themselves() -> None:
    blocks = ((None, 0), (None, 1), (None, 0))
    assert entered(poptorch.PipelinedExecution(), *blocks) == [(0, 0), (1, 1), (0, 0)]
    increment = poptorch.PipelinedExecution(AutoStage.AutoIncrement)
    assert entered(increment, *blocks) == [(1, 0), (2, 1), (3, 0)]
    increment._stages_manager.resetAutoId()
    assert entered(increment, (None, 0)) == [(1, 0)]


def test_an_ipu_is_the_stages_then_the_blocks_then_the_number_of_the_stage() -> None:
    strategy = poptorch.PipelinedExecution("a", "b", Stage("c").ipu(5))
    assert entered(strategy, ("a", 3), ("b", None), ("c", 3)) == [(0, 3), (1, 1), (2, 5)]
    with pytest.raises(AssertionError, match=r"Unknown Block 'd' list of expected Blocks: \['a', "):
        entered(strategy, ("d", 0))
    with pytest.raises(AssertionError, match="SameAsIpu was selected but no IPU was specified"):
        entered(poptorch.PipelinedExecution(), ("a", None))


def test_attributes_nest_and_end() -> None:
    outer = Attribute(op={"a": 1}, other={"x": 1})
    with outer:
        with Attribute(op={"a": 2}), outer:
            assert Attribute.current() == {"op": {"a": 1}, "other": {"x": 1}}
        assert Attribute.current() == {"op": {"a": 1}, "other": {"x": 1}}
    assert Attribute.current() == {}


# ---------------------------------------------------------------- PyTorch


def test_options_need_no_torch() -> None:
    program = """
import sys
sys.modules["torch"] = None  # `import torch` fails
from gpusim import poptorch
options = poptorch.Options().deviceIterations(2).randomSeed(3).outputMode(poptorch.OutputMode.All)
assert options.clone().toDict()["random_seed"] == 3
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=PATIENCE)


def test_a_seed_seeds_torch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    torch = types.ModuleType("torch")
    torch.manual_seed = seeds.append
    monkeypatch.setitem(sys.modules, "torch", torch)
    Options().randomSeed(42)
    assert seeds == [42]
