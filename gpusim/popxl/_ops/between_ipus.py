"""All-reduces over the IPUs of one replica: sums of tensors of one graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..tensor import Tensor, TensorSpec
from .definition import Definition, GradientSite, add_op

__all__ = ["ALL_REDUCE", "ALL_REDUCE_IDENTICAL_GRADIENTS", "ALL_REDUCE_IDENTICAL_INPUTS"]

Array = Any

#: Operators by PopXL's name: from all tensors to one.
FOLDS: dict[str, Callable[[Any, list[Array]], Array]] = {
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


def same_specs(inputs: list[TensorSpec], attributes: Mapping[str, Any]) -> list[TensorSpec]:
    if len({(spec.shape, spec.dtype) for spec in inputs}) != 1:
        raise ValueError(f"ts must all have the same shape and dtype, got {inputs}")
    return inputs


def fold(xp: Any, inputs: list[Array], attributes: Mapping[str, Any]) -> list[Array]:
    if attributes["op"] == "local":
        return inputs
    return [FOLDS[attributes["op"]](xp, inputs)] * len(inputs)


def same(xp: Any, inputs: list[Array], attributes: Mapping[str, Any]) -> list[Array]:
    return inputs


def gradients(site: GradientSite) -> list[Tensor] | None:
    """The outputs' gradients, of which missing ones are zeros; None if all are missing."""
    found = [site.gradient(index) for index in range(len(site.op.outputs))]
    known = next((gradient for gradient in found if gradient is not None), None)
    if known is None:
        return None
    return [known - known if gradient is None else gradient for gradient in found]


def reduced_gradient(site: GradientSite) -> Sequence[Tensor | None]:
    if site.attributes["op"] not in ("add", "mean"):
        raise NotImplementedError(
            f"{site.op.debugName()}: no gradient for op={site.attributes['op']!r}"
        )
    found = gradients(site)
    return [None] * len(site.op.inputs) if found is None else reduce(found, site.attributes)


def reduce(tensors: list[Tensor], attributes: Mapping[str, Any]) -> Sequence[Tensor]:
    return add_op(ALL_REDUCE, tensors, {"op": attributes["op"]})


def passed_gradient(site: GradientSite) -> Sequence[Tensor | None]:
    return [site.gradient(index) for index in range(len(site.op.outputs))]


ALL_REDUCE = Definition("AllReduce", same_specs, fold, reduced_gradient)
#: Its inputs are equal, so that it leaves them as they are; their gradients are reduced.
ALL_REDUCE_IDENTICAL_INPUTS = Definition(
    "AllReduceIdenticalInputs", same_specs, same, reduced_gradient
)
#: The gradients of its outputs are equal, so that they are left as they are.
ALL_REDUCE_IDENTICAL_GRADIENTS = Definition(
    "AllReduceIdenticalGradInputs", same_specs, fold, passed_gradient
)
