"""PopTorch's enumerations, with its names and values.

Options keep most of them as plain numbers; an IntEnum equals its number.
"""

from __future__ import annotations

from enum import Enum, IntEnum

from gpusim.groups import CommGroupType

__all__ = [
    "AutoStage",
    "CommGroupType",
    "ConnectionType",
    "DataLoaderMode",
    "HalfFloatCastingBehavior",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConvPlanType",
    "OutputMode",
    "OverlapMode",
    "ReductionType",
    "SharingStrategy",
    "SyncPattern",
    "VariableRetrievalMode",
]


class MeanReductionStrategy(IntEnum):
    """When a mean over micro-batches and replicas divides.

    - `Running`: the buffer is the mean so far, which cannot overflow.
    - `Post`: once, after everything has been added.
    - `PostAndLoss`: by the replicas before the backward pass, by the micro-batches at the end.
    """

    Running = 0
    Post = 1
    PostAndLoss = 2


class DataLoaderMode(IntEnum):
    """Whether a DataLoader reads in the caller's process or ahead of it, in another."""

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(IntEnum):
    """How a worker process gets its dataset."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class OutputMode(IntEnum):
    """Which micro-batches' outputs a call returns.

    - `Final`: the last of each replica. `Sum`: their sum. `All`: every one.
    - `EveryN`: those of every N-th device iteration.
    - `Default`: All for inference, Final for training.
    """

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


class ConnectionType(IntEnum):
    """When an executor attaches to its device: from the start, at its first run, or never."""

    Always = 0
    OnDemand = 1
    Never = 2


class HalfFloatCastingBehavior(IntEnum):
    """The dtype of operations on float16 and float32; PyTorch upcasts, and so does gpusim."""

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class ReductionType(IntEnum):
    """How gradients, or losses, are combined."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class SyncPattern(IntEnum):
    """Which IPUs wait for each other."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class MatMulSerializationMode(Enum):
    """Along which dimension a matrix product is cut into smaller ones."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"


class Liveness(IntEnum):
    """How long tensors stay on the chip in phased execution."""

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class OverlapMode(Enum):
    """Which loop's next inputs or last outputs are copied while the chip computes."""

    NoOverlap = "no_overlap"
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"


class AutoStage(IntEnum):
    """The default stage of a block: its IPU's number, or the next one."""

    SameAsIpu = 0
    AutoIncrement = 1


class MultiConvPlanType(IntEnum):
    """Whether the convolutions of a MultiConv run side by side or one after the other."""

    Parallel = 0
    Serial = 1


class VariableRetrievalMode(IntEnum):
    """Whether a variable is read back once from each group, or from every replica."""

    OnePerGroup = 0
    AllReplicas = 2
