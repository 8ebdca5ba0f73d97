"""The placement of variables over replicas, by PopART's names."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from gpusim.groups import CommGroupType, Groups
from gpusim.popxl.tensorlocation import ReplicatedTensorSharding, TensorLocation, TensorStorage

__all__ = [
    "CommGroup",
    "CommGroupType",
    "DataType",
    "ReplicatedTensorSharding",
    "TensorLocation",
    "TensorStorage",
    "VariableRetrievalMode",
    "VariableSettings",
    "VirtualGraphMode",
]


class DataType(enum.IntEnum):
    """PopART's data types."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    INT32 = 4
    INT64 = 5
    UINT32 = 6
    UINT64 = 7
    BOOL = 8
    FLOAT = 9
    FLOAT16 = 10
    BFLOAT16 = 11
    DOUBLE = 12
    COMPLEX64 = 13
    COMPLEX128 = 14
    STRING = 15
    FLOAT8_143 = 16
    FLOAT8_152 = 17
    UNDEFINED = 18


class VirtualGraphMode(enum.IntEnum):
    """The way in which ops get their IPU. It has no effect here: `popxl.ipu` says it."""

    Off = 0
    Manual = 1
    Auto = 2
    ExecutionPhases = 3


class VariableRetrievalMode(enum.IntEnum):
    """The replicas whose values return to the host. The numbers are PopART's."""

    OnePerGroup = 0
    """Those of the first replica of each group."""
    AllReduceReplicas = 1
    """Reduced over each group."""
    AllReplicas = 2
    """Those of every replica."""


@dataclass(frozen=True)
class CommGroup:
    """An arrangement of the replicas in groups, and the size of a group.

    >>> CommGroup(CommGroupType.Consecutive, 2).groups(4).members
    ((0, 1), (2, 3))
    """

    type: CommGroupType = CommGroupType.All
    replicaGroupSize: int = 0

    def groups(self, replicas: int) -> Groups:
        """The groups of `replicas` replicas; ValueError if the size does not divide them."""
        return Groups.from_comm_group(self.type, replicas, self.replicaGroupSize or None)


@dataclass(frozen=True)
class VariableSettings:
    """The groups of replicas that share a variable's value, and the replicas whose values return.

    >>> settings = VariableSettings(CommGroup(CommGroupType.Consecutive, 2))
    >>> settings.numReplicasReturningVariable(8), settings.getGroupCount(8)
    (4, 4)
    """

    sharedVariableDomain: CommGroup = field(default_factory=CommGroup)
    retrievalMode: VariableRetrievalMode = VariableRetrievalMode.OnePerGroup

    def getSharedVariableDomain(self) -> CommGroup:
        """The groups."""
        return self.sharedVariableDomain

    def getRetrievalMode(self) -> VariableRetrievalMode:
        """The replicas whose values return."""
        return self.retrievalMode

    def getGroupCount(self, replicas: int) -> int:
        """The number of groups."""
        return self.sharedVariableDomain.groups(replicas).group_count

    def getGroupSize(self, replicas: int) -> int:
        """The number of replicas of a group."""
        return self.sharedVariableDomain.groups(replicas).group_size

    def numReplicasReturningVariable(self, replicas: int) -> int:
        """The number of values that return."""
        if self.retrievalMode is VariableRetrievalMode.AllReplicas:
            return replicas
        return self.getGroupCount(replicas)

    def groups(self, replicas: int) -> list[list[int]]:
        """The replicas of each group."""
        return [list(members) for members in self.sharedVariableDomain.groups(replicas).members]

    def shapeOnHost(self, shape: tuple[int, ...], replicas: int) -> tuple[int, ...]:
        """The shape of the host's values."""
        count = self.numReplicasReturningVariable(replicas)
        return (count, *shape) if count > 1 else tuple(shape)
