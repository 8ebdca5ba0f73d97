"""Arithmetic on elements: sum, difference, product, quotient, power, sign, and in-place forms."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .._definition import (
    Array,
    Arrays,
    Attributes,
    Definition,
    GradientSite,
    Specs,
    add_op,
    gradient_ops,
    same_spec,
)
from ..tensor import Tensor, TensorSpec, constant
from ..typing_ import TensorLike
from ._elementwise import binary, broadcast_gradient, flat, in_place, one_spec, unary
from ._stacked import align, even, narrow, wide

__all__ = [
    "add",
    "add_",
    "sub",
    "mul",
    "div",
    "fmod",
    "pow",
    "abs",
    "sign",
    "negate",
    "increment_mod",
    "increment_mod_",
    "scaled_add",
    "scaled_add_",
]

# Two inputs

ADD = binary("Add", lambda xp, v: v[0] + v[1], (lambda xp, v: v[0], ""), (lambda xp, v: v[0], ""))
ADD_LHS_INPLACE = in_place(ADD, "AddLhsInplace")


def add(lhs: Tensor, rhs: Tensor) -> Tensor:
    """Add two tensors element by element. Shapes broadcast as in NumPy.

    **Raises**

    - TypeError: if the dtypes differ.
    - ValueError: if the shapes do not broadcast.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.add(popxl.constant([[1.0], [2.0]]), popxl.constant([3.0, 2.0]))
    Tensor[add_out popxl.dtypes.float32 (2, 2)]
    """
    return add_op(ADD, [lhs, rhs])[0]


def add_(lhs: Tensor, rhs: Tensor) -> Tensor:
    """Add `rhs` to `lhs` in place: `lhs` changes, and the result shares its memory.

    **Raises**

    - TypeError: if the dtypes differ.
    - ValueError: if `rhs` does not broadcast to the shape of `lhs`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.add_(popxl.variable([1.0, 2.0]), popxl.constant(3.0))
    Tensor[addlhsinplace_out popxl.dtypes.float32 (2,)]
    """
    return add_op(ADD_LHS_INPLACE, [lhs, rhs])[0]


SUB = binary("Sub", lambda xp, v: v[0] - v[1], (lambda xp, v: v[0], ""), (lambda xp, v: -v[0], ""))


def sub(lhs: Tensor, rhs: Tensor) -> Tensor:
    """Subtract `rhs` from `lhs`. Broadcasting and errors as in `add`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.sub(popxl.constant([[1.0], [2.0]]), popxl.constant([3.0, 2.0]))
    Tensor[sub_out popxl.dtypes.float32 (2, 2)]
    """
    return add_op(SUB, [lhs, rhs])[0]


MUL = binary(
    "Mul",
    lambda xp, v: v[0] * v[1],
    (lambda xp, v: v[0] * v[1], "1"),
    (lambda xp, v: v[0] * v[1], "0"),
)


def mul(lhs: Tensor, rhs: Tensor) -> Tensor:
    """Multiply two tensors element by element. Broadcasting and errors as in `add`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.mul(popxl.constant([[1.0], [2.0]]), popxl.constant([3.0, 2.0]))
    Tensor[mul_out popxl.dtypes.float32 (2, 2)]
    """
    return add_op(MUL, [lhs, rhs])[0]


def _divide(xp: ModuleType, inputs: Arrays) -> Array:
    lhs, rhs = inputs
    if lhs.dtype.kind == "f":
        return lhs / rhs
    quotient = lhs // rhs  # rounded down; an IPU rounds to zero, as C
    return quotient + ((quotient < 0) & (quotient * rhs != lhs)).astype(quotient.dtype)


DIV = binary(
    "Div",
    _divide,
    (lambda xp, v: v[0] / v[1], "1"),
    (lambda xp, v: -v[0] * v[1] / (v[2] * v[2]), "01"),
)


def div(lhs: Tensor, rhs: Tensor) -> Tensor:
    """Divide `lhs` by `rhs`; integers round to zero. Broadcasting and errors as in `add`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.div(popxl.constant([[1.0], [2.0]]), popxl.constant([3.0, 2.0]))
    Tensor[div_out popxl.dtypes.float32 (2, 2)]
    """
    return add_op(DIV, [lhs, rhs])[0]


FMOD = binary(
    "Fmod",
    lambda xp, v: xp.fmod(v[0], v[1]),
    (lambda xp, v: v[0], ""),
    (lambda xp, v: -v[0] * xp.trunc(v[1] / v[2]), "01"),
)


def fmod(lhs: Tensor, rhs: Tensor) -> Tensor:
    """The remainder of `lhs` divided by `rhs`, with the sign of `lhs`. Otherwise as `add`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.fmod(popxl.constant([[1.0], [2.0]]), popxl.constant([3.0, 2.0]))
    Tensor[fmod_out popxl.dtypes.float32 (2, 2)]
    """
    return add_op(FMOD, [lhs, rhs])[0]


def _power(xp: ModuleType, inputs: Arrays) -> Array:
    """Powers of arrays in one layout: NumPy's bits depend on the layout."""
    base, exponent = (even(xp, x) for x in xp.broadcast_arrays(*inputs))
    return xp.power(base, exponent)


def _power_of_base(xp: ModuleType, inputs: Arrays) -> Array:
    dy, base, exponent = inputs
    return dy * exponent * _power(xp, [base, exponent - 1])


def _power_of_exponent(xp: ModuleType, inputs: Arrays) -> Array:
    dy, base, power = inputs
    logarithm = xp.log(xp.where(base > 0, base, 1))  # 0 where no real derivative exists
    return dy * power * logarithm


POW = binary("Pow", _power, (_power_of_base, "01"), (_power_of_exponent, "0y"))


def pow(t: Tensor, e: float | int | TensorLike) -> Tensor:
    """Raise each element to the power `e`, a number, an array or a tensor. Errors as in `add`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.pow(popxl.constant([1.0, 2.0]), 3)
    Tensor[pow_out popxl.dtypes.float32 (2,)]
    """
    exponent = e if isinstance(e, Tensor) else constant(e, t.dtype)
    return add_op(POW, [t, exponent])[0]


# One input

ABS = unary("Abs", lambda xp, x, a: xp.abs(x), lambda xp, x, a: xp.sign(x))


def abs(t: Tensor) -> Tensor:
    """The magnitude of each element.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.abs(popxl.constant([-1.5, 2.0]))
    Tensor[abs_out popxl.dtypes.float32 (2,)]
    """
    return add_op(ABS, [t])[0]


SIGN = flat("Sign", lambda xp, x, a: xp.sign(x))


def sign(t: Tensor) -> Tensor:
    """The sign of each element: -1, 0 or 1. Its gradient is zero.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.sign(popxl.constant([1.0, -2.0]))
    Tensor[sign_out popxl.dtypes.float32 (2,)]
    """
    return add_op(SIGN, [t])[0]


NEGATE_GRAD = unary("NegGrad", lambda xp, x, a: -x)
NEGATE = Definition("Neg", same_spec, NEGATE_GRAD.run, gradient_ops((NEGATE_GRAD, "")))


def negate(t: Tensor) -> Tensor:
    """Change the sign of each element.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.negate(popxl.constant([1.0, -2.0]))
    Tensor[neg_out popxl.dtypes.float32 (2,)]
    """
    return add_op(NEGATE, [t])[0]


def _increment_mod(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    (x,) = inputs
    raised = wide(x) + attributes["increment"]
    return [narrow(xp.mod(raised, attributes["modulus"]), x.dtype)]


INCREMENT_MOD = Definition("IncrementMod", same_spec, _increment_mod)
INCREMENT_MOD_INPLACE = in_place(INCREMENT_MOD, "IncrementModInplace")


def increment_mod(t: Tensor, increment: float, modulus: float) -> Tensor:
    """``(t + increment) % modulus``, in the dtype of `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.increment_mod(popxl.constant([3], popxl.uint32), 1, 4)
    Tensor[incrementmod_out popxl.dtypes.uint32 (1,)]
    """
    attributes = {"increment": increment, "modulus": modulus}
    return add_op(INCREMENT_MOD, [t], attributes)[0]


def increment_mod_(t: Tensor, increment: float, modulus: float) -> Tensor:
    """`increment_mod` in place: `t` changes.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.increment_mod_(popxl.variable([3], popxl.uint32), 1, 4)
    Tensor[incrementmodinplace_out popxl.dtypes.uint32 (1,)]
    """
    attributes = {"increment": increment, "modulus": modulus}
    return add_op(INCREMENT_MOD_INPLACE, [t], attributes)[0]


# Any number of inputs


def _add_all(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    if len(inputs) == 1:
        return [inputs[0]]
    values = [wide(x) for x in align(*inputs)]
    added = values[0] + values[1]
    for value in values[2:]:
        added = added + value
    return [narrow(added, inputs[0].dtype)]


SUM_GRAD = broadcast_gradient("SumArgGrad", lambda xp, v: v[0])
SUM = Definition("Sum", one_spec, _add_all, gradient_ops((SUM_GRAD, "")))


# aX + bY: the dtypes may differ; the factors are attributes, or a third and fourth input


def _scaled_spec(inputs: Specs, attributes: Attributes) -> Specs:
    if inputs[0].shape != inputs[1].shape:
        raise ValueError(
            f"X and Y must have the same shape, but they have {inputs[0].shape} and "
            f"{inputs[1].shape}"
        )
    return [TensorSpec(inputs[0].shape, inputs[0].dtype)]


def _scaled_add(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    """[a * X + b * Y], computed in the wider dtype and at least float32, in X's dtype."""
    x, y = wide(inputs[0]), wide(inputs[1])
    factors = iter(inputs[2:])
    scaled = []
    for value, name in ((x, "a"), (y, "b")):
        factor = attributes[name]
        if factor is None:
            factor = align(wide(next(factors)), value)[0]
            factor = narrow(factor.reshape(-1, *(1,) * (value.ndim - 1)), value.dtype)
        scaled.append(value if isinstance(factor, float) and factor == 1 else value * factor)
    return [narrow(scaled[0] + scaled[1], inputs[0].dtype)]


def _scaled_gradient(site: GradientSite) -> list[Any]:
    out: list[Any] = []
    of_factors: list[Any] = []
    factors = iter(range(2, len(site.op.inputs)))
    for index, name in enumerate("ab"):
        factor = site.attributes[name]
        number = next(factors) if factor is None else None
        if number is not None:
            tensor, wanted = site.op.inputs[number], site.needs(number)
            spec = {"shape": tensor.shape, "dtype": tensor.dtype}
            inputs = [site.gradient(0), site.input(index)] if wanted else []
            of_factors += add_op(FACTOR_GRAD, inputs, spec) if wanted else [None]
        if not site.needs(index):
            out.append(None)
            continue
        inputs = [site.gradient(0)] + ([] if number is None else [site.input(number)])
        dtype = site.op.inputs[index].dtype
        out += add_op(SCALE, inputs, {"factor": factor, "dtype": dtype})
    return out + of_factors


def _scale_spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [TensorSpec(inputs[0].shape, attributes["dtype"])]


def _scale(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    x = wide(inputs[0])
    factor = attributes["factor"]
    if factor is None:
        factor = narrow(inputs[1].reshape(-1, *(1,) * (x.ndim - 1)), x.dtype)
    return [narrow(x * factor, attributes["dtype"].as_numpy())]


SCALE = Definition("Scale", _scale_spec, _scale)
FACTOR_GRAD = broadcast_gradient("ScaledAddFactorGrad", lambda xp, v: v[0] * v[1])
SCALED_ADD = Definition(
    "ScaledAdd", _scaled_spec, _scaled_add, gradient=_scaled_gradient, names=("X", "Y")
)
SCALED_ADD_INPLACE = in_place(SCALED_ADD, "ScaledAddLhsInplace")


def scaled_add(X: Tensor, Y: Tensor, a: float | Tensor = 1.0, b: float | Tensor = 1.0) -> Tensor:
    """``a * X + b * Y``, computed in float32 or wider, in the dtype of `X`.

    **Arguments**

    - `X`, `Y`: of one shape; the dtypes may differ.
    - `a`, `b`: numbers, or scalar tensors.

    **Raises**: ValueError: if the shapes differ.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.scaled_add(popxl.constant([1.0]), popxl.constant([2.0]), b=0.5)
    Tensor[scaledadd_out popxl.dtypes.float32 (1,)]
    """
    return _add_scaled(SCALED_ADD, X, Y, a, b)


def scaled_add_(X: Tensor, Y: Tensor, a: float | Tensor = 1.0, b: float | Tensor = 1.0) -> Tensor:
    """`scaled_add` in place: `X` changes, and the result shares its memory.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.scaled_add_(popxl.variable([1.0]), popxl.constant([2.0]), b=0.5)
    Tensor[scaledaddlhsinplace_out popxl.dtypes.float32 (1,)]
    """
    return _add_scaled(SCALED_ADD_INPLACE, X, Y, a, b)


def _add_scaled(
    definition: Definition, X: Tensor, Y: Tensor, a: float | Tensor, b: float | Tensor
) -> Tensor:
    inputs, attributes = [X, Y], dict[str, Any]()
    for name, factor in (("a", a), ("b", b)):
        if isinstance(factor, Tensor):
            inputs.append(factor)
            attributes[name] = None
        else:
            attributes[name] = float(factor)
    return add_op(definition, inputs, attributes)[0]
