"""All-reduce over replicas."""

from __future__ import annotations

from ..._ops.collective import ALL_REDUCE, ALL_REDUCE_INPLACE
from ..._ops.definition import add_op
from ...replica_grouping import ReplicaGrouping
from ...tensor import Tensor
from .collectives import CollectiveOps, group_of, to_collective_op

__all__ = ["replicated_all_reduce", "replicated_all_reduce_"]


def replicated_all_reduce(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> Tensor:
    """The reduction of a tensor over the replicas of each group, on all of them.

    **Arguments**

    - `op`: "add", "mean", "mul", "min", "max", "and", "or", "square_add" (the sum of the squares)
      or "local" (nothing).
    - `group`: by default one group of all replicas.

    Sums and means are those of `gpusim.collectives.psum` and `pmean`: their order and rounding are
    what the `gpusim.reduction` context says that a session runs in.

    Raises:
        ValueError: for another operator.
        NotImplementedError: for groups without one stride.
    """
    attributes = {"op": to_collective_op(op), "group": group_of(group)}
    return add_op(ALL_REDUCE, [t], attributes)[0]


def replicated_all_reduce_(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> Tensor:
    """As `replicated_all_reduce`, in place."""
    attributes = {"op": to_collective_op(op), "group": group_of(group)}
    return add_op(ALL_REDUCE_INPLACE, [t], attributes)[0]
