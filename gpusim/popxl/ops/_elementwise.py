"""Shared by the ops on single elements: definitions of one and two inputs, and in-place forms."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np

from .. import dtypes
from .._definition import (
    Array,
    Arrays,
    Attributes,
    Definition,
    Specs,
    gradient_ops,
    no_gradient,
    same_spec,
    shape_spec,
)
from ..tensor import TensorSpec
from ._stacked import align, even, narrow, unbroadcast, wide

__all__ = [
    "binary",
    "broadcast_spec",
    "flat",
    "in_place",
    "one_spec",
    "plain",
    "broadcast_gradient",
    "unary",
]

# One input

Compute = Callable[[ModuleType, Array, Attributes], Array]


def unary(
    op_type: str, compute: Compute, slope: Compute | None = None, of: str = "x"
) -> Definition:
    """An op of one input. `slope` is the derivative, as a function of the input or the output."""

    def run(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
        (x,) = inputs
        return [narrow(compute(xp, even(xp, wide(x)), attributes), x.dtype)]

    if slope is None:
        return Definition(op_type, same_spec, run)

    def run_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
        dy, value = inputs
        return [narrow(wide(dy) * slope(xp, even(xp, wide(value)), attributes), dy.dtype)]

    grad = Definition(f"{op_type}Grad", same_spec, run_gradient)

    return Definition(op_type, same_spec, run, gradient_ops((grad, of)))


def flat(op_type: str, compute: Compute) -> Definition:
    """An op of one input whose derivative is zero wherever it exists."""
    definition = unary(op_type, compute)
    return Definition(op_type, definition.infer, definition.run, gradient=no_gradient)


def in_place(definition: Definition, op_type: str) -> Definition:
    """The form of an op that writes its result into its first input."""
    compute = definition.run

    def run(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
        inputs[0][...] = compute(xp, inputs, attributes)[0]
        return [inputs[0]]

    return Definition(
        op_type, definition.infer, run, aliases={0: 0}, modifies=(0,), names=definition.names
    )


# Two inputs, and more


def broadcast_spec(inputs: Specs, dtype: dtypes.dtype | None = None) -> TensorSpec:
    """The spec of the result of broadcasting the inputs together.

    **Raises**

    - ValueError: if the shapes do not broadcast.
    - TypeError: if the dtypes differ.
    """
    if len({spec.dtype for spec in inputs}) > 1:
        listed = ", ".join(str(spec.dtype.name) for spec in inputs)
        raise TypeError(f"The inputs must have one data type, but they have {listed}: use ops.cast")
    try:
        shape = np.broadcast_shapes(*(spec.shape for spec in inputs))
    except ValueError:
        listed = ", ".join(str(spec.shape) for spec in inputs)
        raise ValueError(f"The inputs' shapes {listed} do not broadcast together") from None
    return TensorSpec(shape, inputs[0].dtype if dtype is None else dtype)


def one_spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [broadcast_spec(inputs)]


Function = Callable[[ModuleType, Arrays], Array]


def broadcast_gradient(op_type: str, compute: Function) -> Definition:
    """A gradient that is computed in the broadcast shape and summed to the input's shape."""

    def run(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
        values = [wide(x) for x in align(*inputs)]
        gradient = unbroadcast(xp, compute(xp, values), attributes["shape"])
        return [narrow(gradient, attributes["dtype"].as_numpy())]

    return Definition(op_type, shape_spec, run)


def plain(compute: Function) -> Callable[..., Arrays]:
    """A `run` for a function that NumPy rounds once in every dtype."""

    def run(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
        lhs, rhs = inputs
        if lhs.ndim != rhs.ndim:
            inputs = align(lhs, rhs)
        return [compute(xp, inputs)]

    return run


def binary(
    op_type: str,
    compute: Function,
    left: tuple[Function, str] | None = None,
    right: tuple[Function, str] | None = None,
) -> Definition:
    """An op of two inputs that broadcast, with the gradient of each as a function."""
    rules = [
        None if side is None else (broadcast_gradient(f"{op_type}Arg{index}Grad", side[0]), side[1])
        for index, side in enumerate((left, right))
    ]
    return Definition(op_type, one_spec, plain(compute), gradient_ops(*rules), names=("lhs", "rhs"))
