"""PopTorch's exceptions, and functions of its backend, under PopTorch's module name.

A message is "'type': text"; both are attributes, with the location.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

__all__ = [
    "Error",
    "ErrorCategory",
    "RecoverableError",
    "TestErrorType",
    "UnrecoverableError",
    "isCompilingWithDispatcher",
]

PYTHON_ERROR = "poptorch_py_error"
COMPILER_ERROR = "poptorch_cpp_error"
POPART_ERROR = "popart_exception"


class ErrorCategory(IntEnum):
    """The remedy of an error: another program, a reset and another try, or other hardware."""

    Other = 0
    RuntimeRecoverable = 1
    RuntimeUnrecoverable = 2


class Error(Exception):
    """An error of PopTorch itself, as opposed to the ValueError of a wrong argument.

    Made by `createPoptorchError`, or with the whole text as its argument.
    """

    category = ErrorCategory.Other
    type = ""  #: the component that raised it, "poptorch_py_error" for PopTorch's Python
    message = ""  #: the text, without the component
    location = ""  #: where in a backend; empty if it came from none


class RecoverableError(Error):
    """A reset and another try may help; `recovery_action` says which reset."""

    category = ErrorCategory.RuntimeRecoverable
    recovery_action = ""  #: "IPU_RESET", "PARTITION_RESET" or "FULL_RESET"


class UnrecoverableError(Error):
    """The hardware has failed; a reset does not help."""

    category = ErrorCategory.RuntimeUnrecoverable


class TestErrorType(IntEnum):
    """The kinds of errors that PopTorch's backend raises to test a program's handling of them."""

    __test__ = False  # not a class of tests, for pytest

    Poptorch = 0
    Popart = 1
    PopartInternal = 2
    Poplibs = 3
    PoplarUnrecoverable = 4
    PoplarUnknown = 5
    PoplarRecoverableFullReset = 6
    PoplarLinkError = 7


def isCompilingWithDispatcher() -> bool:
    """Whether this is the forward of a wrapped model, which PopTorch runs only to compile it.

    >>> isCompilingWithDispatcher()
    False
    """
    context = sys.modules.get(f"{__package__}.executor.context")  # without it no model is wrapped
    return context is not None and context.isRunningOnIpu()


def createPoptorchError(msg: str) -> Error:
    """The error that PopTorch's Python raises, not yet raised.

    >>> error = createPoptorchError("Device is not attached")
    >>> error.type, error.message, error.location
    ('poptorch_py_error', 'Device is not attached', '')
    >>> raise error
    Traceback (most recent call last):
    ...
    gpusim.poptorch.poptorch_core.Error: 'poptorch_py_error': Device is not attached
    """
    return _error(PYTHON_ERROR, msg)


def compiler_error(message: str) -> Error:
    """The error that PopTorch's compiler raises, not yet raised.

    >>> compiler_error("Slicing step must be at least 1").type
    'poptorch_cpp_error'
    """
    return _error(COMPILER_ERROR, message)


def popart_error(message: str) -> Error:
    """The error that PopART raises under PopTorch, not yet raised.

    >>> popart_error("no pipeline").type
    'popart_exception'
    """
    return _error(POPART_ERROR, message)


def _error(kind: str, message: str) -> Error:
    error = Error(f"'{kind}': {message}")
    error.type, error.message = kind, message
    return error


# ---------------------------------------------------------------- options

POPTORCH_OPTIONS = frozenset(
    """
    accumulation_and_replication_reduction_type anchored_tensors auto_round_num_ipus
    available_memory_proportion broadcast_buffers compilation_progress_bar_fn connection_type
    device_iterations distributed_process_id execution_mode gradient_accumulation input_group_size
    input_group_type ipu_id ipu_version ipuof_configs location_accumulator location_activation
    location_optimizer location_weight log_dir max_repeat_logs
    meanAccumulationAndReplicationReductionStrategy model_name numIOTiles num_distributed_processes
    output_mode output_return_period random_seed replication_factor separate_backward_phase
    serial_phases_execution sync_pattern tensors_liveness updatable_named_buffers use_model
    """.split()
)
"""The names that PopTorch's own options have in `Options.toDict`."""

SESSION_OPTIONS = frozenset(
    """
    accumulationAndReplicationReductionType accumulationFactor aliasZeroCopy autoRecomputation
    bufferingDepthMap cachePath compilationProgressTotal compileEngine constantWeights
    convolutionOptions createImplicitPipeliningFwdOnlyProgram customCodeletCompileFlags
    customCodelets decomposeGradSum defaultBufferingDepth defaultPrefetchBufferingDepth
    delayVarUpdates disableGradAccumulationTensorStreams disableOptimizerStateTensorStreams
    dotChecks dotOpNames enableConvolutionGraphCaching enableDistributedReplicatedGraphs
    enableEngineCaching enableExplicitIR enableExplicitMainLoops enableFloatingPointChecks
    enableFullyConnectedPass enableGradientAccumulation enableGroupedMatmuls
    enableInplaceAmbiguityChecking enableLoadAndOffloadRNGState enableMergeExchange
    enableNonStableSoftmax enableOutlining enableOutliningCopyCostPruning enablePipelining
    enablePrefetchDatastreams enableReplicatedGraphs enableRngStateManagement
    enableSerializedMatmuls enableStableNorm enableStochasticRounding
    enableSupportedDataTypeCasting enableVariablesCaching engineOptions ensureFp32LossScaleTensor
    experimentalSettings explicitRecomputation exportPoplarComputationGraph
    exportPoplarVertexGraph finalDotOp firstDotOp gclOptions globalReplicaOffset
    globalReplicationFactor groupHostSync groupNormStridedChannelGrouping hardwareInstrumentations
    instrumentWithHardwareCycleCounter kahnTieBreaker logDir looseThresholdAtPeak lstmOptions
    matmulOptions mergeVarUpdate mergeVarUpdateMemThreshold opxAliasChecking opxModifyChecking
    outlineSequenceBreakCost outlineThreshold partialsTypeMatMuls patterns patterns_level
    prefetchBufferingDepthMap rearrangeAnchorsOnHost rearrangeStreamsOnHost replicatedGraphCount
    reportOptions saveInitializersToFile scheduleNonWeightUpdateGradientConsumersEarly
    separateCallOpPdfs serializedPoprithmsAnnealGraphsDir serializedPoprithmsShiftGraphsDir
    strictOpVersions subgraphCopyingStrategy swapLimitScheduler syntheticDataMode
    throwIfLog2ScaleTensorNotInRange timeLimitScheduler transitiveClosureOptimizationThreshold
    updatableNamedBuffers useHostCopyOps useLoopCandidateCreator virtualGraphMode
    _enableRngStateManagement
    """.split()
)
"""The names of PopART's session options, and `patterns`, which PopTorch sets beside them."""

SESSION_GROUPS = frozenset(
    """
    accumulateOuterFragmentSettings accumulatorTensorLocationSettings
    activationTensorLocationSettings autodiffSettings automaticLossScalingSettings
    batchSerializationSettings developerSettings executionPhaseSettings gpusim
    optimizerStateTensorLocationSettings replicatedCollectivesSettings
    tensorLocationSettingsOverride weightTensorLocationSettings
    """.split()
)
"""The groups of session options, whose members are set as "group.member"; gpusim's own too."""

VALUE_TYPES = {
    bool: "bool",
    int: "integer",
    float: "float",
    str: "string",
    list: "list",
    tuple: "list",
    set: "list",
    frozenset: "list",
    dict: "dictionary",
}


def _validateOptions(options: Mapping[str, Any]) -> None:
    """Check the options of `Options.toDict`, as a compilation does.

    **Raises**: poptorch.Error for an option that neither PopTorch nor PopART's session has, and
    for a session option that is not a bool, number, string, list, set or dictionary.

    >>> _validateOptions({"device_iterations": 2, "autoRecomputation": 3})
    >>> _validateOptions({"autoRecompute": 3})
    Traceback (most recent call last):
    ...
    gpusim.poptorch.poptorch_core.Error: 'poptorch_cpp_error': Unknown integer option autoRecompute
    """
    for name, value in options.items():
        if name in POPTORCH_OPTIONS:
            continue
        kind = next((VALUE_TYPES[one] for one in type(value).__mro__ if one in VALUE_TYPES), None)
        if kind is None:
            raise compiler_error(f"Unknown value type {type(value)} for option {name}")
        if name not in SESSION_OPTIONS and name.partition(".")[0] not in SESSION_GROUPS:
            raise compiler_error(f"Unknown {kind} option {name}")
