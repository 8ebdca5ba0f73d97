"""PopTorch's options, enumerations, errors and logging; its models and optimizers are not here yet.

A name of PopTorch that is missing is an AttributeError that says so; nothing here is a stub.
Nothing needs PyTorch.
"""

from __future__ import annotations

from . import enums, options, poptorch_core
from ._logging import logger, setLogLevel
from .enums import (
    AutoStage,
    CommGroupType,
    ConnectionType,
    DataLoaderMode,
    HalfFloatCastingBehavior,
    Liveness,
    MatMulSerializationMode,
    MeanReductionStrategy,
    MultiConvPlanType,
    OutputMode,
    OverlapMode,
    ReductionType,
    SharingStrategy,
    SyncPattern,
    VariableRetrievalMode,
)
from .hardware import ipuHardwareIsAvailable, ipuHardwareVersion
from .options import (
    Attribute,
    ConfigFileError,
    Options,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
    TensorLocationSettings,
)
from .poptorch_core import Error, RecoverableError, UnrecoverableError

__version__ = "3.3.0+gpusim"  # the PopTorch whose interface this is

__all__ = [
    "Attribute",
    "AutoStage",
    "CommGroupType",
    "ConfigFileError",
    "ConnectionType",
    "DataLoaderMode",
    "Error",
    "HalfFloatCastingBehavior",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConvPlanType",
    "Options",
    "OutputMode",
    "OverlapMode",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "RecoverableError",
    "ReductionType",
    "SerialPhasedExecution",
    "ShardedExecution",
    "SharingStrategy",
    "Stage",
    "SyncPattern",
    "TensorLocationSettings",
    "UnrecoverableError",
    "VariableRetrievalMode",
    "__version__",
    "enums",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "logger",
    "options",
    "poptorch_core",
    "setLogLevel",
]

# PopTorch's other public names. Whoever adds one takes it out here: a test compares.
MISSING = frozenset(
    """
    AsynchronousDataAccessor BeginBlock Block BlockFunction CPU DataLoader ICustomArgParser
    LegacyBeginBlockFn MultiConv NameScope PoplarExecutor cond ctc_beam_search_decoder custom_op
    dynamic_slice dynamic_update for_loop fps identity_loss inferenceModel ipu_print_tensor
    isRunningOnIpu load nearest nop ops optim poptorchAtExit profiling recomputationCheckpoint
    registerCustomArgParser registerGeometricCustomArgParsers registerPostCompileHook
    registerPreCompileHook removeBlocks serializedMatMul set_available_memory
    set_overlap_for_input set_overlap_for_output testing trainingModel
    """.split()
)


def __getattr__(name: str) -> object:
    if name in MISSING:
        there = ", ".join(public for public in __all__ if not public.startswith("__"))
        raise AttributeError(
            f"gpusim has no poptorch.{name} yet. Of PopTorch's names it has: {there}"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
