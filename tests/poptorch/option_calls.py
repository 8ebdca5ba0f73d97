"""Every method of poptorch.Options: how it is called, and what may be read afterwards."""

from __future__ import annotations

from typing import Any

from gpusim.poptorch import (
    CommGroupType,
    ConnectionType,
    HalfFloatCastingBehavior,
    MeanReductionStrategy,
    Options,
    OutputMode,
    ReductionType,
    SyncPattern,
    TensorLocationSettings,
)


class HalfType:
    """Stands for torch.float16, which has this text and comes from this module."""

    def __str__(self) -> str:
        return "torch.float16"


HalfType.__module__ = "torch"
OFF_CHIP = TensorLocationSettings().useOnChipStorage(False)

# group, method, arguments, what can be read afterwards: options of the group, or of PopART
METHODS: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = [
    ("", "deviceIterations", (3,), {"device_iterations": 3}),
    ("", "replicationFactor", (4,), {"replication_factor": 4}),
    ("", "inputReplicaGrouping", (1, CommGroupType.Orthogonal), {"input_group_type": 2}),
    ("", "broadcastBuffers", (False,), {"broadcast_buffers": False}),
    ("", "autoRoundNumIPUs", (), {"auto_round_num_ipus": True}),
    (
        "",
        "setAvailableMemoryProportion",
        ({"IPU1": 0.5},),
        {"available_memory_proportion": {1: 0.5}},
    ),
    ("", "useIpuModel", (True,), {"use_model": True}),
    ("", "connectionType", (ConnectionType.OnDemand,), {"connection_type": 1}),
    ("", "syncPattern", (SyncPattern.ReplicaAndLadder,), {"sync_pattern": 2}),
    ("", "useIpuId", (5,), {"ipu_id": 5}),
    ("", "useOfflineIpuTarget", (), {"ipu_version": 2, "connection_type": ConnectionType.Never}),
    ("", "outputMode", (OutputMode.All,), {"output_mode": 2, "output_return_period": 1}),
    ("", "outputMode", (OutputMode.EveryN, 7), {"output_mode": 1, "output_return_period": 7}),
    (
        "",
        "anchorTensor",
        ("g", "Gradient___w"),
        {"anchored_tensors": {"g": ["Gradient___w", True, None, 1]}},
    ),
    (
        "",
        "anchorTensor",
        ("g", "w", OutputMode.EveryN, 2),
        {"anchored_tensors": {"g": ["w", False, 1, 2]}},
    ),
    (
        "",
        "anchorTensor",
        ("g", "w", OutputMode.Sum, 2),
        {"anchored_tensors": {"g": ["w", False, 3, 1]}},
    ),
    ("", "updatableNamedBuffers", (["mean"],), {"updatable_named_buffers": ["mean"]}),
    ("", "logDir", ("logs",), {"log_dir": "logs"}),
    ("", "maxRepeatLogs", (None,), {"max_repeat_logs": None}),
    ("", "maxRepeatLogs", (9,), {"max_repeat_logs": 9}),
    ("", "modelName", ("bert",), {"model_name": "bert"}),
    ("", "randomSeed", (42,), {"random_seed": 42}),
    ("", "sourceLocationExcludes", (["a"],), {"_source_location_excludes": ["a"]}),
    ("", "showCompilationProgressBar", (False,), {"_show_compilation_progress_bar": False}),
    ("", "relaxOptimizerAttributesChecks", (), {"_relax_optimizer_checks": True}),
    ("", "disableModuleNamescope", (), {"_module_namescope_enabled": False}),
    ("", "enableExecutableCaching", ("c",), {"cachePath": "c", "enableEngineCaching": True}),
    ("", "enableExecutableCaching", (None,), {"enableEngineCaching": False}),
    ("", "enableStableNorm", (True,), {"enableStableNorm": True}),
    ("", "enableSyntheticData", (True,), {"syntheticDataMode": 2}),
    ("", "enableSyntheticData", (False,), {"syntheticDataMode": 0}),
    ("", "logCycleCount", (True,), {"instrumentWithHardwareCycleCounter": True}),
    (
        "",
        "enableProfiling",
        ("p",),
        {
            "engineOptions": {
                "debug.allowOutOfMemory": "true",
                "autoReport.directory": "p",
                "autoReport.all": "true",
            }
        },
    ),
    ("Jit", "traceModel", (False,), {"trace_model": False}),
    (
        "Precision",
        "halfFloatCasting",
        (HalfFloatCastingBehavior.Default,),
        {"half_float_casting": 2},
    ),
    (
        "Precision",
        "runningStatisticsAlwaysFloat",
        (False,),
        {"running_statistics_always_float": False},
    ),
    ("Precision", "enableFloatingPointExceptions", (True,), {"enableFloatingPointChecks": True}),
    ("Precision", "enableStochasticRounding", (True,), {"enableStochasticRounding": True}),
    (
        "Precision",
        "setPartialsType",
        (HalfType(),),
        {"partialsTypeMatMuls": "half", "convolutionOptions": {"partialsType": "half"}},
    ),
    ("Training", "gradientAccumulation", (8,), {"gradient_accumulation": 8}),
    (
        "Training",
        "accumulationAndReplicationReductionType",
        (ReductionType.Sum,),
        {"accumulation_and_replication_reduction_type": ReductionType.Sum},
    ),
    (
        "Training",
        "setMeanAccumulationAndReplicationReductionStrategy",
        (MeanReductionStrategy.Running,),
        {"meanAccumulationAndReplicationReductionStrategy": MeanReductionStrategy.Running},
    ),
    (
        "Training",
        "setAutomaticLossScaling",
        (True,),
        {"automaticLossScalingSettings.enabled": True},
    ),
    (
        "Training",
        "setConvolutionDithering",
        (True,),
        {"convolutionOptions": {"enableConvDithering": True}},
    ),
    ("Distributed", "configureProcessId", (1, 3), {"processId": 1, "numProcesses": 3}),
    ("Distributed", "setEnvVarNames", ("NO_SUCH", "NONE"), {"processId": 0, "numProcesses": 1}),
    ("Distributed", "disable", (), {"processId": 0, "numProcesses": 1}),
    ("TensorLocations", "numIOTiles", (32,), {"numIOTiles": 32}),
    (
        "TensorLocations",
        "setActivationLocation",
        (OFF_CHIP,),
        {"location_activation": {"onChip": 0}},
    ),
    ("TensorLocations", "setWeightLocation", (OFF_CHIP,), {"location_weight": {"onChip": 0}}),
    ("TensorLocations", "setOptimizerLocation", (OFF_CHIP,), {"location_optimizer": {"onChip": 0}}),
    (
        "TensorLocations",
        "setAccumulatorLocation",
        (OFF_CHIP,),
        {"location_accumulator": {"onChip": 0}},
    ),
    ("_Popart", "set", ("autoRecomputation", 3), {"autoRecomputation": 3}),
    ("_Popart", "setEngineOptions", ({"a": "b"},), {"engineOptions": {"a": "b"}}),
    (
        "_Popart",
        "setPatterns",
        ({"PadSum": True}, 0),
        {"patterns": {"PadSum": True}, "patterns_level": 0},
    ),
]


def group_of(options: Options, group: str) -> Any:
    return getattr(options, group) if group else options


def call(options: Options, group: str, method: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(group_of(options, group), method)(*arguments)
