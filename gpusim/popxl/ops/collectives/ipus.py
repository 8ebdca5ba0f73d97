"""Reductions over the IPUs of one replica: sums of tensors of one graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..._definition import Array, Arrays, Attributes, Definition, GradientSite, Specs, add_op
from ...tensor import Tensor
from .collectives import CollectiveOps, to_collective_op

__all__ = ["all_reduce", "all_reduce_identical_inputs", "all_reduce_identical_grad_inputs"]

#: PopXL's operators, from all tensors to one.
FOLDS: dict[str, Callable[[Any, Arrays], Array]] = {
    "add": lambda xp, values: functools.reduce(xp.add, values),
    "mean": lambda xp, values: (functools.reduce(xp.add, values) / len(values)).astype(
        values[0].dtype
    ),
    "mul": lambda xp, values: functools.reduce(xp.multiply, values),
    "min": lambda xp, values: functools.reduce(xp.minimum, values),
    "max": lambda xp, values: functools.reduce(xp.maximum, values),
    "and": lambda xp, values: functools.reduce(xp.logical_and, values).astype(values[0].dtype),
    "or": lambda xp, values: functools.reduce(xp.logical_or, values).astype(values[0].dtype),
    "square_add": lambda xp, values: functools.reduce(xp.add, [value * value for value in values]),
}


def same_specs(inputs: Specs, attributes: Attributes) -> Specs:
    if len({(spec.shape, spec.dtype) for spec in inputs}) != 1:
        raise ValueError(f"ts must all have the same shape and dtype, got {inputs}")
    return inputs


def fold(xp: Any, inputs: Arrays, attributes: Attributes) -> Arrays:
    if attributes["op"] == "local":
        return inputs
    return [FOLDS[attributes["op"]](xp, inputs)] * len(inputs)


def same(xp: Any, inputs: Arrays, attributes: Attributes) -> Arrays:
    return inputs


def gradients(site: GradientSite) -> list[Tensor] | None:
    """The outputs' gradients, with zeros for missing ones; None if all are missing."""
    dys = [site.gradient(index) for index in range(len(site.op.outputs))]
    first = next((gradient for gradient in dys if gradient is not None), None)
    if first is None:
        return None
    return [first - first if gradient is None else gradient for gradient in dys]


def reduced_gradient(site: GradientSite) -> Sequence[Tensor | None]:
    if site.attributes["op"] not in ("add", "mean"):
        raise NotImplementedError(
            f"{site.op.debugName()}: no gradient for op={site.attributes['op']!r}"
        )
    dys = gradients(site)
    return [None] * len(site.op.inputs) if dys is None else reduce(dys, site.attributes)


def reduce(tensors: list[Tensor], attributes: Attributes) -> Sequence[Tensor]:
    return add_op(ALL_REDUCE, tensors, {"op": attributes["op"]})


def passed_gradient(site: GradientSite) -> Sequence[Tensor | None]:
    return [site.gradient(index) for index in range(len(site.op.outputs))]


ALL_REDUCE = Definition("AllReduce", same_specs, fold, reduced_gradient)
#: The inputs are equal, so that only their gradients are reduced.
ALL_REDUCE_IDENTICAL_INPUTS = Definition(
    "AllReduceIdenticalInputs", same_specs, same, reduced_gradient
)
#: The gradients of the outputs are equal, so that they are not reduced.
ALL_REDUCE_IDENTICAL_GRADIENTS = Definition(
    "AllReduceIdenticalGradInputs", same_specs, fold, passed_gradient
)


def all_reduce(
    ts: Iterable[Tensor], ipus: Iterable[int] | None = None, op: CollectiveOps = "add"
) -> list[Tensor]:
    """Reduce tensors on different IPUs of a replica; the result is on each of these IPUs.

    **Arguments**

    - `ts`: tensors of one shape and dtype.
    - `ipus`: the IPU of each tensor, by default the one it has been placed on.
    - `op`: as for `replicated_all_reduce`.

    **Raises**: ValueError: if shapes or dtypes differ, for another operator, or if there is not a
    known IPU for each tensor.
    """
    return between_ipus(ALL_REDUCE, ts, ipus, op)


def all_reduce_identical_inputs(
    ts: Iterable[Tensor], ipus: Iterable[int] | None = None, op: CollectiveOps = "add"
) -> list[Tensor]:
    """Return the tensors, which must be equal, and reduce their gradients. See `all_reduce`."""
    return between_ipus(ALL_REDUCE_IDENTICAL_INPUTS, ts, ipus, op)


def all_reduce_identical_grad_inputs(
    ts: Iterable[Tensor], ipus: Iterable[int] | None = None, op: CollectiveOps = "add"
) -> list[Tensor]:
    """As `all_reduce`, with the outputs' gradients, which must be equal, as those of the inputs."""
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
