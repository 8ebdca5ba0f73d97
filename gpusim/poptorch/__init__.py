"""PopTorch: models that train and infer on simulated replicas, their optimizers and options.

Names that need PyTorch are loaded at the first use.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from gpusim.optional import require as _require

from . import _impl as _impl
from . import enums, options, poptorch_core, profiling
from ._logging import logger, setLogLevel
from ._version import VERSION as __version__
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

if TYPE_CHECKING:
    from . import ops, optim, testing
    from .blocks import (
        BeginBlock,
        Block,
        BlockFunction,
        LegacyBeginBlockFn,
        module_repr,
        removeBlocks,
    )
    from .data import AsynchronousDataAccessor, DataLoader
    from .executor import (
        ICustomArgParser,
        PoplarExecutor,
        inferenceModel,
        isRunningOnIpu,
        load,
        poptorchAtExit,
        registerCustomArgParser,
        registerGeometricCustomArgParsers,
        registerPostCompileHook,
        registerPreCompileHook,
        trainingModel,
    )
    from .losses import identity_loss
    from .ops import (
        CPU,
        MultiConv,
        NameScope,
        cond,
        ctc_beam_search_decoder,
        custom_op,
        dynamic_slice,
        dynamic_update,
        for_loop,
        fps,
        ipu_print_tensor,
        nearest,
        nop,
        recomputationCheckpoint,
        register_custom_op,
        serializedMatMul,
        set_available_memory,
        set_overlap_for_input,
        set_overlap_for_output,
    )

__all__ = [
    "AsynchronousDataAccessor",
    "Attribute",
    "AutoStage",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "CPU",
    "CommGroupType",
    "ConfigFileError",
    "ConnectionType",
    "DataLoader",
    "DataLoaderMode",
    "Error",
    "HalfFloatCastingBehavior",
    "ICustomArgParser",
    "LegacyBeginBlockFn",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConv",
    "MultiConvPlanType",
    "NameScope",
    "Options",
    "OutputMode",
    "OverlapMode",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "PoplarExecutor",
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
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "enums",
    "for_loop",
    "fps",
    "identity_loss",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "ipu_print_tensor",
    "isRunningOnIpu",
    "load",
    "logger",
    "module_repr",
    "nearest",
    "nop",
    "ops",
    "optim",
    "options",
    "poptorchAtExit",
    "poptorch_core",
    "profiling",
    "recomputationCheckpoint",
    "registerCustomArgParser",
    "registerGeometricCustomArgParsers",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "register_custom_op",
    "removeBlocks",
    "serializedMatMul",
    "setLogLevel",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
    "testing",
    "trainingModel",
]

# The names that need PyTorch, by their modules; "" for modules.
_WITH_TORCH = {
    **dict.fromkeys(("ops", "optim", "testing"), ""),
    "identity_loss": "losses",
    **dict.fromkeys(
        """
        CPU MultiConv NameScope cond ctc_beam_search_decoder custom_op dynamic_slice
        dynamic_update for_loop fps ipu_print_tensor nearest nop recomputationCheckpoint
        register_custom_op serializedMatMul set_available_memory set_overlap_for_input
        set_overlap_for_output
        """.split(),
        "ops",
    ),
    **dict.fromkeys(
        "BeginBlock Block BlockFunction LegacyBeginBlockFn module_repr removeBlocks".split(),
        "blocks",
    ),
    **dict.fromkeys(("AsynchronousDataAccessor", "DataLoader"), "data"),
    **dict.fromkeys(
        """
        ICustomArgParser PoplarExecutor inferenceModel isRunningOnIpu load poptorchAtExit
        registerCustomArgParser registerGeometricCustomArgParsers registerPostCompileHook
        registerPreCompileHook trainingModel
        """.split(),
        "executor",
    ),
}


def __getattr__(name: str) -> object:
    if name in _WITH_TORCH:
        _require(f"poptorch.{name} needs", "torch")
        module = _WITH_TORCH[name]
        found = _import_module(f"{__name__}.{module or name}")
        value = getattr(found, name) if module else found
        globals()[name] = value  # the next access finds it at once
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, also those that are loaded on first use."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
