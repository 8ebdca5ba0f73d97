"""Comparisons, tests and logic on elements; `where` chooses between two tensors."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from .. import dtypes
from .._definition import (
    Array,
    Arrays,
    Attributes,
    Definition,
    Specs,
    add_op,
    gradient_ops,
    no_gradient,
    shape_spec,
)
from ..tensor import Tensor, TensorSpec
from ._elementwise import Function, broadcast_spec, plain
from ._stacked import align, narrow, unbroadcast
from .utils import cast_if_needed

__all__ = [
    "equal",
    "greater",
    "logical_and",
    "logical_or",
    "logical_not",
    "isinf",
    "isnan",
    "isfinite",
    "where",
]

# Two inputs


def _one_bool(inputs: Specs, attributes: Attributes) -> Specs:
    return [broadcast_spec(inputs, dtypes.bool)]


def _compare(op_type: str, compute: Function) -> Definition:
    return Definition(
        op_type, _one_bool, plain(compute), gradient=no_gradient, names=("lhs", "rhs")
    )


EQUAL = _compare("Equal", lambda xp, v: v[0] == v[1])


def equal(lhs: Tensor, rhs: Tensor) -> Tensor:
    """Whether elements are equal, as bool. Broadcasting and errors as in `ops.add`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.equal(popxl.constant([[1.0], [2.0]]), popxl.constant([3.0, 2.0]))
    Tensor[equal_out popxl.dtypes.bool (2, 2)]
    """
    return add_op(EQUAL, [lhs, rhs])[0]


GREATER = _compare("Greater", lambda xp, v: v[0] > v[1])


def greater(input: Tensor, other: Tensor) -> Tensor:
    """Whether elements of `input` are greater than those of `other`, as bool. Otherwise as `equal`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.greater(popxl.constant([[1.0], [2.0]]), popxl.constant([3.0, 2.0]))
    Tensor[greater_out popxl.dtypes.bool (2, 2)]
    """
    return add_op(GREATER, [input, other])[0]


AND = _compare("And", lambda xp, v: xp.logical_and(v[0], v[1]))


def logical_and(lhs: Tensor, rhs: Tensor) -> Tensor:
    """Whether both elements are true, as bool. Other dtypes are cast to bool.

    **Raises**: ValueError: if the shapes do not broadcast.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.logical_and(popxl.constant([True, False]), popxl.constant(True))
    Tensor[and_out popxl.dtypes.bool (2,)]
    """
    sides = [cast_if_needed(t, dtypes.bool) for t in (lhs, rhs)]
    return add_op(AND, sides)[0]


OR = _compare("Or", lambda xp, v: xp.logical_or(v[0], v[1]))


def logical_or(lhs: Tensor, rhs: Tensor) -> Tensor:
    """Whether either element is true, as bool. Other dtypes are cast to bool.

    **Raises**: ValueError: if the shapes do not broadcast.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.logical_or(popxl.constant([True, False]), popxl.constant(True))
    Tensor[or_out popxl.dtypes.bool (2,)]
    """
    sides = [cast_if_needed(t, dtypes.bool) for t in (lhs, rhs)]
    return add_op(OR, sides)[0]


# One input


def _bool_spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [TensorSpec(inputs[0].shape, dtypes.bool)]


def _test(op_type: str, compute: Callable[[ModuleType, Array], Array]) -> Definition:
    def run(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
        return [compute(xp, inputs[0])]

    return Definition(op_type, _bool_spec, run, gradient=no_gradient)


NOT = _test("Not", lambda xp, x: xp.logical_not(x))


def logical_not(t: Tensor) -> Tensor:
    """Whether each element is false, as bool. Other dtypes are cast to bool.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.logical_not(popxl.constant([True, False]))
    Tensor[not_out popxl.dtypes.bool (2,)]
    """
    return add_op(NOT, [cast_if_needed(t, dtypes.bool)])[0]


IS_INF = _test("IsInf", lambda xp, x: xp.isinf(x))


def isinf(t: Tensor) -> Tensor:
    """Whether each element is infinite, as bool.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.isinf(popxl.constant([1.0, float("inf")]))
    Tensor[isinf_out popxl.dtypes.bool (2,)]
    """
    return add_op(IS_INF, [t])[0]


IS_NAN = _test("IsNaN", lambda xp, x: xp.isnan(x))


def isnan(t: Tensor) -> Tensor:
    """Whether each element is NaN, as bool.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.isnan(popxl.constant([1.0, float("nan")]))
    Tensor[isnan_out popxl.dtypes.bool (2,)]
    """
    return add_op(IS_NAN, [t])[0]


def isfinite(t: Tensor) -> Tensor:
    """Whether each element is neither infinite nor NaN, as bool.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.isfinite(popxl.constant([1.0, float("inf")]))
    Tensor[and_out popxl.dtypes.bool (2,)]
    """
    return logical_and(logical_not(isinf(t)), logical_not(isnan(t)))


# Where


def _where_spec(inputs: Specs, attributes: Attributes) -> Specs:
    condition, lhs, rhs = inputs
    chosen = broadcast_spec([lhs, rhs])
    as_condition = TensorSpec(condition.shape, chosen.dtype)
    return [broadcast_spec([as_condition, chosen])]


def _where(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    return [xp.where(*align(*inputs))]


def _chosen(op_type: str, when: bool) -> Definition:
    def run(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
        dy, condition = align(*inputs)
        chosen = xp.where(condition, dy, 0) if when else xp.where(condition, 0, dy)
        return [unbroadcast(xp, narrow(chosen, dy.dtype), attributes["shape"])]

    return Definition(op_type, shape_spec, run)


WHERE_X_GRAD = _chosen("WhereXGrad", True)
WHERE_Y_GRAD = _chosen("WhereYGrad", False)
WHERE = Definition(
    "Where",
    _where_spec,
    _where,
    gradient_ops(None, (WHERE_X_GRAD, "0"), (WHERE_Y_GRAD, "0")),
    names=("condition", "lhs", "rhs"),
)


def where(condition: Tensor, lhs: Tensor, rhs: Tensor) -> Tensor:
    """Take elements of `lhs` where the condition is true, else of `rhs`.

    Shapes broadcast as in NumPy. A condition of another dtype is cast to bool.

    **Raises**

    - TypeError: if the dtypes of `lhs` and `rhs` differ.
    - ValueError: if the shapes do not broadcast.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.where(popxl.constant([True, False]), popxl.constant(1.0), popxl.constant(2.0))
    Tensor[where_out popxl.dtypes.float32 (2,)]
    """
    return add_op(WHERE, [cast_if_needed(condition, dtypes.bool), lhs, rhs])[0]
