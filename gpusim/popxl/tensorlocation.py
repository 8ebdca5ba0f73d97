"""Where a tensor's data lies: on the chip or off it, whole on every replica or in shards."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["ReplicatedTensorSharding", "TensorLocation", "TensorStorage"]


class TensorStorage(Enum):
    """The memory of a tensor."""

    OnChip = "OnChip"
    OffChip = "OffChip"


class ReplicatedTensorSharding(Enum):
    """Whether each replica holds a shard of a tensor."""

    On = "On"
    Off = "Off"


@dataclass(frozen=True)
class TensorLocation:
    """A memory, and whether the tensor is sharded over replicas."""

    storage: TensorStorage = TensorStorage.OnChip
    replicated_tensor_sharding: ReplicatedTensorSharding = ReplicatedTensorSharding.Off
