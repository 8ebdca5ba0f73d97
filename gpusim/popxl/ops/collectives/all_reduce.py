"""All-reduce over the IPUs of a replica."""

from __future__ import annotations

from collections.abc import Iterable

from ..._ops.between_ipus import (
    ALL_REDUCE,
    ALL_REDUCE_IDENTICAL_GRADIENTS,
    ALL_REDUCE_IDENTICAL_INPUTS,
)
from ..._ops.definition import Definition, add_op
from ...tensor import Tensor
from .collectives import CollectiveOps, to_collective_op

__all__ = ["all_reduce", "all_reduce_identical_grad_inputs", "all_reduce_identical_inputs"]


def all_reduce(
    ts: Iterable[Tensor], ipus: Iterable[int] | None = None, op: CollectiveOps = "add"
) -> list[Tensor]:
    """The reduction of tensors that lie on different IPUs of a replica, on each of these.

    **Arguments**

    - `ts`: tensors of one shape and dtype.
    - `ipus`: the IPU of each; by default where it has been placed.
    - `op`: as for `replicated_all_reduce`.

    ValueError for tensors that differ, for another operator, and where the IPUs are not as many as
    the tensors, or not known.
    """
    return between_ipus(ALL_REDUCE, ts, ipus, op)


def all_reduce_identical_inputs(
    ts: Iterable[Tensor], ipus: Iterable[int] | None = None, op: CollectiveOps = "add"
) -> list[Tensor]:
    """The tensors, which are equal, as they are; their gradients are reduced. As `all_reduce`."""
    return between_ipus(ALL_REDUCE_IDENTICAL_INPUTS, ts, ipus, op)


def all_reduce_identical_grad_inputs(
    ts: Iterable[Tensor], ipus: Iterable[int] | None = None, op: CollectiveOps = "add"
) -> list[Tensor]:
    """As `all_reduce`; the outputs' gradients, which are equal, are those of the inputs."""
    return between_ipus(ALL_REDUCE_IDENTICAL_GRADIENTS, ts, ipus, op)


def between_ipus(
    definition: Definition, ts: Iterable[Tensor], ipus: Iterable[int] | None, op: CollectiveOps
) -> list[Tensor]:
    tensors = list(ts)
    places = [tensor._get_ipu() for tensor in tensors] if ipus is None else list(ipus)
    if any(place is None for place in places):
        raise ValueError(
            "Could not automatically infer the IPU of all input Tensors `ts`. Please specify the "
            "IPUs via the `ipus` parameter."
        )
    if len(places) != len(tensors):
        raise ValueError(
            "Number of specified tensor does not equal number of specified IPUs. "
            f"{len(tensors)} != {len(places)}"
        )
    attributes = {"op": to_collective_op(op), "ipus": places}
    return list(add_op(definition, tensors, attributes))
