"""The names of the collectives' operators, and their default group of replicas."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from ...context import get_ir
from ...replica_grouping import ReplicaGrouping

__all__ = ["to_collective_op", "group_of"]

CollectiveOps: TypeAlias = Literal[
    "add", "mean", "mul", "min", "max", "and", "or", "square_add", "local"
]


def to_collective_op(op: CollectiveOps) -> str:
    """Check an operator's name, and return it; ValueError for an unknown one.

    >>> to_collective_op("mean")
    'mean'
    """
    names = get_args(CollectiveOps)
    if op not in names:
        raise ValueError(f"Not a valid op: {op}. Must choose from: {', '.join(names)}")
    return op


def group_of(group: ReplicaGrouping | None) -> ReplicaGrouping:
    """The groups of a collective, by default one group of all replicas.

    **Raises**: NotImplementedError: if the groups have no constant stride.
    """
    if group is None:
        return get_ir().replica_grouping()
    group._need_const()
    return group
