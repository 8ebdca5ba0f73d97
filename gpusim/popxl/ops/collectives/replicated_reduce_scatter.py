"""Reduce-scatter over replicas, and each replica's slice of a value that all have."""

from __future__ import annotations

from ..._ops.collective import REDUCE_SCATTER, SLICE
from ..._ops.definition import add_op
from ...replica_grouping import ReplicaGrouping
from ...tensor import Tensor, TensorSpec
from .collectives import CollectiveOps, group_of, to_collective_op

__all__ = ["replica_sharded_slice", "replicated_reduce_scatter", "replicated_slice"]


def replicated_reduce_scatter(
    t: Tensor,
    op: CollectiveOps = "add",
    group: ReplicaGrouping | None = None,
    configure_output_for_replicated_tensor_sharding: bool = False,
) -> Tensor:
    """The reduction of a tensor over each group, of which each replica gets one slice.

    **Arguments**

    - `op`, `group`: as for `replicated_all_reduce`; "local" slices the replica's own value.
    - `configure_output_for_replicated_tensor_sharding`: whether the slice is a shard, which
      remembers the tensor's shape as its meta_shape.

    **Returns** the slice: 1-D, of ceil(elements / group size) elements; zeros fill up the last.
    """
    groups = group_of(group)
    size = groups.group_size
    whole = t.meta_shape or t.shape
    meta = whole if configure_output_for_replicated_tensor_sharding else ()
    attributes = {
        "op": to_collective_op(op),
        "group": groups,
        "group_size": size,
        "spec": TensorSpec((-(-t.nelms // size),), t.dtype, meta),
    }
    return add_op(REDUCE_SCATTER, [t], attributes)[0]


def replica_sharded_slice(t: Tensor, group: ReplicaGrouping | None = None) -> Tensor:
    """Each replica's shard of its own value: 1-D, padded, with the tensor's shape as meta_shape."""
    return replicated_reduce_scatter(t, "local", group, True)


def replicated_slice(t: Tensor, axis: int = 0, group: ReplicaGrouping | None = None) -> Tensor:
    """Each replica's part of its own value, by its place in the group, along an axis.

    ValueError where the group does not divide the axis, or there is no such axis.
    """
    groups = group_of(group)
    size = groups.group_size
    if not -t.rank <= axis < t.rank:
        raise ValueError(f"axis={axis}: out of range for {t}")
    axis %= t.rank
    if t.shape[axis] % size:
        raise ValueError(
            f"Replicated slice must equally divide axis. Axis size: {t.shape[axis]}. Replica group "
            f"size: {size}"
        )
    shape = (*t.shape[:axis], t.shape[axis] // size, *t.shape[axis + 1 :])
    attributes = {
        "axis": axis,
        "group": groups,
        "group_size": size,
        "spec": TensorSpec(shape, t.dtype),
    }
    return add_op(SLICE, [t], attributes)[0]
