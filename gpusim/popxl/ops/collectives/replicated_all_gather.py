"""All-gather over replicas."""

from __future__ import annotations

import math
from typing import Literal

from ..._ops.collective import ALL_GATHER
from ..._ops.definition import add_op
from ...replica_grouping import ReplicaGrouping
from ...tensor import Tensor, TensorSpec
from .collectives import group_of

__all__ = ["replicated_all_gather"]


def replicated_all_gather(
    t: Tensor,
    axis: int = 0,
    group: ReplicaGrouping | None = None,
    output_shape: Literal["new_axis", "concat", "meta_shape", "auto"] = "auto",
) -> Tensor:
    """The values of all replicas of each group together, on all of them.

    **Arguments**

    - `axis`: along which "concat" puts them together.
    - `group`: by default one group of all replicas.
    - `output_shape`: "new_axis": (group size, *shape). "concat": `axis` is that many times longer.
      "meta_shape": the tensors are shards of one of their meta_shape, which is put together and
      loses its padding. "auto": "meta_shape" for tensors that have one, else "concat".

    Raises:
        ValueError: for another `output_shape`, an `axis` that is no integer or out of range, and
            shards that do not make up their meta_shape.
        NotImplementedError: for groups without one stride.
    """
    if not isinstance(axis, int):
        raise ValueError(f"Axis should be an int. Type: {type(axis)}. Value: {axis}")
    if output_shape not in ("new_axis", "concat", "meta_shape", "auto"):
        raise ValueError(
            "output_shape must equal one of 'new_axis', 'concat', 'meta_shape', 'auto'. "
            f"Value: {output_shape}"
        )
    groups = group_of(group)
    mode = output_shape
    if mode == "auto":
        mode = "meta_shape" if t.meta_shape else "concat"
    if mode == "concat" and not t.shape:
        mode = "new_axis"  # numbers have no axis, and make a vector
    shape, axis = gathered_shape(t, axis, groups.group_size, mode)
    attributes = {
        "axis": axis,
        "group": groups,
        "output_shape": mode,
        "spec": TensorSpec(shape, t.dtype),
    }
    return add_op(ALL_GATHER, [t], attributes)[0]


def gathered_shape(t: Tensor, axis: int, size: int, mode: str) -> tuple[tuple[int, ...], int]:
    """The result's shape, and the axis counted from the front."""
    if mode == "new_axis":
        return (size, *t.shape), 0
    if mode == "meta_shape":
        count = math.prod(t.meta_shape)
        if not t.meta_shape or t.nelms * size < count or t.nelms != -(-count // size):
            raise ValueError(
                f"{size} shards of shape {t.shape} do not make up the meta_shape {t.meta_shape}"
            )
        return t.meta_shape, 0
    if not -t.rank <= axis < t.rank:
        raise ValueError(f"axis={axis}: out of range for {t}")
    axis %= t.rank
    return (*t.shape[:axis], size * t.shape[axis], *t.shape[axis + 1 :]), axis
