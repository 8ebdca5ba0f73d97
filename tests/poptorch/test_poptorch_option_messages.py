"""poptorch.Options: each message, and frozen options."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from gpusim import poptorch
from gpusim.poptorch import (
    CommGroupType,
    HalfFloatCastingBehavior,
    Options,
    OutputMode,
    Phase,
    ReductionType,
    Stage,
    TensorLocationSettings,
)
from tests.poptorch.option_calls import METHODS, HalfType, call

pytestmark = pytest.mark.usefixtures("single")

# ---------------------------------------------------------------- messages


REFUSED: list[tuple[Callable[[Options], Any], type[Exception], str]] = [
    (
        lambda o: o.set(nothing=1),
        AssertionError,
        "Invalid option nothing, valid options are dict_keys([",
    ),
    (
        lambda o: o.deviceIterations("2"),
        AssertionError,
        "Unexpected type <class 'str'> for option device_iterations. Expected <class 'int'>",
    ),
    (
        lambda o: o.deviceIterations(0),
        ValueError,
        "device_iterations=0: expected a number of at least 1",
    ),
    (
        lambda o: o.replicationFactor(-2),
        ValueError,
        "replication_factor=-2: expected a number of at least 1",
    ),
    (
        lambda o: o.Training.gradientAccumulation(0),
        ValueError,
        "gradient_accumulation=0: expected a number",
    ),
    (lambda o: o.nothing, AttributeError, "Invalid attribute nothing."),
    (lambda o: o("nothing"), AttributeError, "Invalid attribute nothing."),
    (
        lambda o: setattr(o, "_nothing", 1),
        AttributeError,
        "Invalid private attribute _nothing. Valid attributes: ['_jit', ",
    ),
    (
        lambda o: o.update({"log_dir": 1}),
        AssertionError,
        "Can't merge dictionaries, they have some keys in common",
    ),
    (lambda o: o.toDict(), AssertionError, "An output mode must be picked before serialisation"),
    (
        lambda o: o.Jit.traceModel(True),
        ValueError,
        "options.Jit.traceModel(True) is no longer supported",
    ),
    (
        lambda o: o.Precision.runningStatisticsAlwaysFloat(1),
        ValueError,
        "runningStatisticsAlwaysFloat needs to be set to a bool",
    ),
    (lambda o: o.Precision.halfFloatCasting(1), ValueError, "halfFloatCasting must be set to "),
    (
        lambda o: o.Precision.enableFloatingPointExceptions(1),
        AssertionError,
        "enableFloatingPointExceptions needs to be set to a bool",
    ),
    (
        lambda o: o.Precision.setPartialsType("torch.float16"),
        ValueError,
        "parameter to setPartialsType should be eithertorch.float or torch.half",
    ),
    (
        lambda o: o.Training.accumulationAndReplicationReductionType(ReductionType.NoReduction),
        ValueError,
        "accumulationAndReplicationReductionType must be set to poptorch.ReductionType.Mean or "
        "poptorch.ReductionType.Sum",
    ),
    (
        lambda o: o.Training.accumulationAndReplicationReductionType(1),
        ValueError,
        "accumulationAndReplicationReductionType must be set to poptorch.ReductionType.Mean or ",
    ),
    (
        lambda o: o.Training.setMeanAccumulationAndReplicationReductionStrategy(1),
        AssertionError,
        "Unexpected type <class 'int'> for option meanAccumulationAndReplicationReductionStrategy",
    ),
    (
        lambda o: o.setAvailableMemoryProportion({"0": 0.5}),
        AssertionError,
        'Available memory proportions are expected to be in a dictionary of {"IPU0": 0.5} where '
        "the 0 in IPU is the index of the IPU. Invalid key: 0",
    ),
    (
        lambda o: o.inputReplicaGrouping(2, CommGroupType.All),
        ValueError,
        "input_group_type cannot be All",
    ),
    (
        lambda o: o.inputReplicaGrouping(2, CommGroupType.Consecutive),
        ValueError,
        "input_group_size cannot be larger than replication_factor",
    ),
    (
        lambda o: o.replicationFactor(3).inputReplicaGrouping(2, CommGroupType.Consecutive),
        ValueError,
        "input_group_size must be a factor of replication_factor",
    ),
    (
        lambda o: o.outputMode(OutputMode.EveryN),
        AssertionError,
        "EveryN anchor must have output_return_period set to valid positive integer",
    ),
    (lambda o: o.outputMode(OutputMode.EveryN, -1), AssertionError, "EveryN anchor must have "),
    (
        lambda o: o.anchorTensor("a", "b", OutputMode.EveryN, 0),
        AssertionError,
        "EveryN anchor must have ",
    ),
    (
        lambda o: o.maxRepeatLogs("4"),
        AssertionError,
        "Unexpected type <class 'str'> for option max_repeat",
    ),
    (
        lambda o: o.TensorLocations.numIOTiles(33),
        AssertionError,
        "numIOTiles must be an even number between 32 and 192.",
    ),
    (
        lambda o: o.TensorLocations.numIOTiles(30),
        AssertionError,
        "numIOTiles must be an even number",
    ),
    (
        lambda o: o.TensorLocations.numIOTiles(194),
        AssertionError,
        "numIOTiles must be an even number",
    ),
    (
        lambda o: o.Distributed.configureProcessId(2, 2),
        ValueError,
        "process_id=2: expected one of 0 to 1, as num_processes=2",
    ),
    (lambda o: Stage(3), AssertionError, "Block IDs are supposed to be strings but got (3,)"),
    (
        lambda o: Phase("a", Stage("b")),
        AssertionError,
        "All arguments must either be block IDs (strings) or Stages: [<class 'str'>, ",
    ),
    (
        lambda o: Phase("a").ipus(0, 1),
        AssertionError,
        "Phase contains 1 stages but you provided 2 ipus",
    ),
    (
        lambda o: poptorch.PipelinedExecution("a", "a"),
        AssertionError,
        "a associated with more than one stage",
    ),
    (lambda o: poptorch.PipelinedExecution("a").stage("b"), AssertionError, "Unknown block b"),
    (
        lambda o: poptorch.SerialPhasedExecution(),
        AssertionError,
        "There is currently no AutoStage for PhasedExecution, please explicitly specify",
    ),
    (
        lambda o: poptorch.SerialPhasedExecution("a").phase(-1),
        AssertionError,
        "Phases are identified by positive integers",
    ),
]


@pytest.mark.parametrize(
    ("act", "kind", "message"), REFUSED, ids=[case[2][:40] for case in REFUSED]
)
def test_message(act: Callable[[Options], Any], kind: type[Exception], message: str) -> None:
    options = Options()
    with pytest.raises(kind) as raised:
        act(options)
    assert type(raised.value) is kind
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    "act",
    [
        lambda o: o.outputMode(2),
        lambda o: o.connectionType(1),
        lambda o: o.syncPattern(0),
        lambda o: o.useIpuId("0"),
        lambda o: o.randomSeed(1.0),
        lambda o: o.setExecutionStrategy("serial"),
        lambda o: o.inputReplicaGrouping(1, 1),
        lambda o: o.TensorLocations.setWeightLocation({}),
        lambda o: TensorLocationSettings().useOnChipStorage(1),
        lambda o: TensorLocationSettings().minElementsForOffChip(1.0),
    ],
)
def test_plain_values_are_no_members_of_enumerations(act: Callable[[Options], Any]) -> None:
    options = Options()
    with pytest.raises(AssertionError):
        act(options)
    assert options == Options()


def test_deprecated_methods_warn(lines: Callable[[], list[tuple[str, str]]]) -> None:
    options = Options()
    options.Jit.traceModel(False)
    options.Precision.halfFloatCasting(HalfFloatCastingBehavior.HalfUpcastToFloat)
    options.Precision.runningStatisticsAlwaysFloat(True)
    assert [level for level, _ in lines()] == ["WARNING"] * 3
    starts = (
        "Jit.traceModel",
        "Precision.halfFloatCasting",
        "Precision.runningStatisticsAlwaysFloat",
    )
    for (_, text), start in zip(lines(), starts, strict=True):
        assert text.startswith(f"[Deprecated] Do not call options.{start}(): ")


def test_an_output_period_without_every_n_is_logged(lines: Callable[[], list[Any]]) -> None:
    Options().outputMode(OutputMode.All, 3)
    assert lines()[-1][0] == "INFO"
    assert lines()[-1][1].startswith(
        "Anchor return period argument ignored with output_mode set to "
    )


def test_profiling_of_the_environment_counts_more(
    monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[Any]]
) -> None:
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.all":"true"}')
    Options().enableProfiling()
    assert lines() == [
        (
            "WARNING",
            "Profiling setting overridden by environment variable. Check content of "
            "POPLAR_ENGINE_OPTIONS.",
        )
    ]


# ---------------------------------------------------------------- freezing


@pytest.mark.parametrize(("group", "method", "arguments", "expected"), METHODS)
def test_frozen_options_cannot_be_set(
    group: str, method: str, arguments: tuple[Any, ...], expected: dict[str, Any]
) -> None:
    options = Options()
    options._freeze()
    before = repr(options)
    with pytest.raises(AttributeError, match=r"^Can't modify frozen Options$"):
        call(options, group, method, arguments)
    assert repr(options) == before


@pytest.mark.parametrize(
    "act",
    [
        lambda o: o.set(random_seed=42),
        lambda o: setattr(o, "device_iterations", 2),
        lambda o: setattr(o.Training, "gradient_accumulation", 2),
        lambda o: o.createOrSet(new=1),
        lambda o: o.deleteIfExists("log_dir"),
        lambda o: o.setExecutionStrategy(poptorch.ShardedExecution()),
        lambda o: o.appendToLocationExcludes("x"),
        lambda o: o.from_json('{"deviceIterations": 2}'),
        lambda o: o.checkIsFrozen(),
    ],
)
def test_frozen_options_cannot_be_changed_in_other_ways(act: Callable[[Options], Any]) -> None:
    options = Options()
    options._freeze()
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        act(options)
    options._unfreeze()
    assert options == Options()


def test_copies_are_not_frozen() -> None:
    options = Options()
    options._freeze()
    for copied in (options.clone(), copy.deepcopy(options)):
        copied.deviceIterations(5).Training.gradientAccumulation(4)
        copied._Popart.set("x", 1)
        copied.Precision.setPartialsType(HalfType())
        copied.Distributed.configureProcessId(5, 15)
        assert copied._Popart.options["partialsTypeMatMuls"] == "half"
    assert options.device_iterations == 1 and "x" not in options._Popart.options


def test_frozen_options_can_be_read_and_stay_frozen_when_pickled() -> None:
    options = Options().outputMode(OutputMode.All)
    options._freeze()
    assert options.toDict()["output_mode"] == 2
    loaded = pickle.loads(pickle.dumps(options))
    assert loaded == options
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        loaded.Training.gradientAccumulation(2)
