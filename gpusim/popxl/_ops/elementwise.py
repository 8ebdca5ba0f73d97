"""Ops that make each element of elements in its place: arithmetic, comparisons, activations.
Each is defined beside its gradient's op and its in-place form, which writes into its first input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from .. import dtypes
from ..tensor import TensorSpec
from .definition import Definition, GradientSite, add_op
from .special import erf
from .stacked import Array, aligned, even, narrow, unbroadcast, wide

Attributes = Mapping[str, Any]
Specs = list[TensorSpec]

# One input


def same_spec(inputs: Specs, attributes: Attributes) -> Specs:
    """The spec of the first input."""
    return [TensorSpec(inputs[0].shape, inputs[0].dtype)]


def _bool_spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [TensorSpec(inputs[0].shape, dtypes.bool)]


Compute = Callable[[ModuleType, Array, Attributes], Array]
Slope = Callable[[ModuleType, Array, Attributes], Array]


def _unary(
    op_type: str, compute: Compute, slope: Slope | None = None, of: str = "input"
) -> Definition:
    """An op of one input, with the derivative as a function of that input or of the output."""

    def run(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
        (x,) = inputs
        return [narrow(compute(xp, even(xp, wide(x)), attributes), x.dtype)]

    if slope is None:
        return Definition(op_type, infer=same_spec, run=run)

    def run_gradient(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
        dy, value = inputs
        return [narrow(wide(dy) * slope(xp, even(xp, wide(value)), attributes), dy.dtype)]

    grad = Definition(f"{op_type}Grad", infer=same_spec, run=run_gradient)

    def gradient(site: GradientSite) -> list[Any]:
        value = site.input(0) if of == "input" else site.output(0)
        return [add_op(grad, [site.gradient(0), value], site.attributes)[0]]

    return Definition(op_type, infer=same_spec, run=run, gradient=gradient)


def _flat(op_type: str, compute: Compute) -> Definition:
    """An op of one input whose derivative is zero wherever it has one."""
    made = _unary(op_type, compute)
    return Definition(op_type, infer=made.infer, run=made.run, gradient=lambda site: [None])


def _test(op_type: str, compute: Callable[[ModuleType, Array], Array]) -> Definition:
    def run(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
        return [compute(xp, inputs[0])]

    return Definition(op_type, infer=_bool_spec, run=run, gradient=lambda site: [None])


def in_place(definition: Definition, op_type: str) -> Definition:
    """The form of an op that writes its result into its first input."""
    compute = definition.run

    def run(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
        inputs[0][...] = compute(xp, inputs, attributes)[0]
        return [inputs[0]]

    return Definition(
        op_type,
        infer=definition.infer,
        run=run,
        aliases={0: 0},
        modifies=(0,),
        names=definition.names,
    )


_SQRT_2_OVER_PI = 0.7978845608028654
_CUBE = 0.044715  # gelu's, as in the paper that proposed it


def _gelu_inner(xp: ModuleType, x: Array) -> Array:
    return xp.tanh(_SQRT_2_OVER_PI * (x + _CUBE * x * x * x))


def _gelu_slope(xp: ModuleType, x: Array, attributes: Attributes) -> Array:
    t = _gelu_inner(xp, x)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _SQRT_2_OVER_PI * (1 + 3 * _CUBE * x * x)


def _gelu_erf(xp: ModuleType, x: Array, attributes: Attributes) -> Array:
    return x * (0.5 * (1 + erf(xp, x * 2**-0.5))).astype(x.dtype)


def _gelu_erf_slope(xp: ModuleType, x: Array, attributes: Attributes) -> Array:
    density = xp.exp(-0.5 * x * x) * (0.5 * _SQRT_2_OVER_PI)
    return (0.5 * (1 + erf(xp, x * 2**-0.5))).astype(x.dtype) + x * density


def sigmoid(xp: ModuleType, x: Array) -> Array:
    """1 / (1 + exp(-x)), by the exponential that does not overflow."""
    small = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1 / (1 + small), small / (1 + small))


def _swish_slope(xp: ModuleType, x: Array, attributes: Attributes) -> Array:
    s = sigmoid(xp, x)
    return s + x * s * (1 - s)


def _clip(xp: ModuleType, x: Array, attributes: Attributes) -> Array:
    return xp.minimum(xp.maximum(x, attributes["min"]), attributes["max"])


def _clip_slope(xp: ModuleType, x: Array, attributes: Attributes) -> Array:
    return ((x >= attributes["min"]) & (x <= attributes["max"])).astype(x.dtype)


ABS = _unary("Abs", lambda xp, x, a: xp.abs(x), lambda xp, x, a: xp.sign(x))
CEIL = _flat("Ceil", lambda xp, x, a: xp.ceil(x))
CLIP = _unary("Clip", _clip, _clip_slope)
COS = _unary("Cos", lambda xp, x, a: xp.cos(x), lambda xp, x, a: -xp.sin(x))
EXP = _unary("Exp", lambda xp, x, a: xp.exp(x), lambda xp, y, a: y, of="output")
FLOOR = _flat("Floor", lambda xp, x, a: xp.floor(x))
GELU = _unary("Gelu", lambda xp, x, a: 0.5 * x * (1 + _gelu_inner(xp, x)), _gelu_slope)
GELU_ERF = _unary("GeluErf", _gelu_erf, _gelu_erf_slope)
LOG = _unary("Log", lambda xp, x, a: xp.log(x), lambda xp, x, a: 1 / x)
LOG2 = _unary("Log2", lambda xp, x, a: xp.log2(x), lambda xp, x, a: float(1 / np.log(2)) / x)
RELU = _unary(
    "Relu", lambda xp, x, a: xp.maximum(x, 0), lambda xp, y, a: (y > 0).astype(y.dtype), "output"
)
SIGN = _flat("Sign", lambda xp, x, a: xp.sign(x))
SIN = _unary("Sin", lambda xp, x, a: xp.sin(x), lambda xp, x, a: xp.cos(x))
SQRT = _unary("Sqrt", lambda xp, x, a: xp.sqrt(x), lambda xp, y, a: 0.5 / y, of="output")
SWISH = _unary("Swish", lambda xp, x, a: x * sigmoid(xp, x), _swish_slope)
TANH = _unary("Tanh", lambda xp, x, a: xp.tanh(x), lambda xp, y, a: 1 - y * y, of="output")

IS_INF = _test("IsInf", lambda xp, x: xp.isinf(x))
IS_NAN = _test("IsNaN", lambda xp, x: xp.isnan(x))
NOT = _test("Not", lambda xp, x: xp.logical_not(x))


def _negate_gradient(site: GradientSite) -> list[Any]:
    return [add_op(NEGATE_GRAD, [site.gradient(0)])[0]]


NEGATE_GRAD = _unary("NegGrad", lambda xp, x, a: -x)
NEGATE = Definition("Neg", infer=same_spec, run=NEGATE_GRAD.run, gradient=_negate_gradient)

EXP_INPLACE = in_place(EXP, "ExpInplace")
GELU_INPLACE = in_place(GELU, "GeluInplace")
GELU_ERF_INPLACE = in_place(GELU_ERF, "GeluErfInplace")
RELU_INPLACE = in_place(RELU, "ReluInplace")
SWISH_INPLACE = in_place(SWISH, "SwishInplace")


def _increment_mod(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    (x,) = inputs
    raised = wide(x) + attributes["increment"]
    return [narrow(xp.mod(raised, attributes["modulus"]), x.dtype)]


INCREMENT_MOD = Definition("IncrementMod", infer=same_spec, run=_increment_mod)
INCREMENT_MOD_INPLACE = in_place(INCREMENT_MOD, "IncrementModInplace")


# Two inputs


def broadcast_spec(inputs: Specs, dtype: dtypes.dtype | None = None) -> TensorSpec:
    """The spec of what broadcasts its inputs together.

    Raises:
        ValueError: for shapes that do not broadcast.
        TypeError: for different data types.
    """
    if len({spec.dtype for spec in inputs}) > 1:
        given = ", ".join(str(spec.dtype.name) for spec in inputs)
        raise TypeError(f"The inputs must have one data type, but they have {given}: use ops.cast")
    try:
        shape = np.broadcast_shapes(*(spec.shape for spec in inputs))
    except ValueError:
        given = ", ".join(str(spec.shape) for spec in inputs)
        raise ValueError(f"The inputs' shapes {given} do not broadcast together") from None
    return TensorSpec(shape, inputs[0].dtype if dtype is None else dtype)


def _one_spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [broadcast_spec(inputs)]


def _one_bool(inputs: Specs, attributes: Attributes) -> Specs:
    return [broadcast_spec(inputs, dtypes.bool)]


def shape_spec(inputs: Specs, attributes: Attributes) -> Specs:
    """The spec that the attributes `shape` and `dtype` give (gradients of broadcast inputs)."""
    return [TensorSpec(tuple(attributes["shape"]), attributes.get("dtype") or inputs[0].dtype)]


Function = Callable[[ModuleType, list[Array]], Array]


def _reduced(op_type: str, compute: Function) -> Definition:
    """A gradient that is computed in the broadcast shape and summed to that of the input."""

    def run(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
        values = [wide(x) for x in aligned(*inputs)]
        gradient = unbroadcast(xp, compute(xp, values), attributes["shape"])
        return [narrow(gradient, attributes["dtype"].as_numpy())]

    return Definition(op_type, infer=shape_spec, run=run)


def _gradient_of(*arguments: tuple[Definition, str] | None) -> Callable[[GradientSite], list[Any]]:
    """The rule that builds one op for each input: out of the gradient, then what the letters name.

    l and r are the first and the second input, o is the output.
    """

    def rule(site: GradientSite) -> list[Any]:
        found = {
            "l": lambda: site.input(0),
            "r": lambda: site.input(1),
            "o": lambda: site.output(0),
        }
        out: list[Any] = []
        for index, argument in enumerate(arguments):
            if argument is None or not site.needs(index):
                out.append(None)
                continue
            definition, letters = argument
            spec = site.op.inputs[index].spec
            given = [site.gradient(0), *(found[letter]() for letter in letters)]
            out += add_op(definition, given, {"shape": spec.shape, "dtype": spec.dtype})
        return out

    return rule


def _plain(compute: Function) -> Callable[..., list[Array]]:
    """A run of what NumPy rounds once, whatever the type."""

    def run(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
        lhs, rhs = inputs
        if lhs.ndim != rhs.ndim:
            inputs = aligned(lhs, rhs)
        return [compute(xp, inputs)]

    return run


def _binary(
    op_type: str,
    compute: Function,
    left: tuple[Function, str] | None = None,
    right: tuple[Function, str] | None = None,
) -> Definition:
    """An op of two inputs that broadcast, with the gradient of each as a function."""
    rules = [
        None if side is None else (_reduced(f"{op_type}Arg{index}Grad", side[0]), side[1])
        for index, side in enumerate((left, right))
    ]
    return Definition(
        op_type,
        infer=_one_spec,
        run=_plain(compute),
        gradient=None if left is None else _gradient_of(*rules),
        names=("lhs", "rhs"),
    )


def _divide(xp: ModuleType, inputs: list[Array]) -> Array:
    lhs, rhs = inputs
    if lhs.dtype.kind == "f":
        return lhs / rhs
    quotient = lhs // rhs  # rounded down; the IPU, as C, rounds to zero
    return quotient + ((quotient < 0) & (quotient * rhs != lhs)).astype(quotient.dtype)


def _power(xp: ModuleType, inputs: list[Array]) -> Array:
    """Powers of arrays in one layout: NumPy's bits depend on it."""
    base, exponent = (even(xp, x) for x in xp.broadcast_arrays(*inputs))
    return xp.power(base, exponent)


def _power_of_base(xp: ModuleType, inputs: list[Array]) -> Array:
    dy, base, exponent = inputs
    return dy * exponent * _power(xp, [base, exponent - 1])


def _power_of_exponent(xp: ModuleType, inputs: list[Array]) -> Array:
    dy, base, power = inputs
    logarithm = xp.log(xp.where(base > 0, base, 1))  # 0 where no real derivative exists
    return dy * power * logarithm


ADD = _binary("Add", lambda xp, v: v[0] + v[1], (lambda xp, v: v[0], ""), (lambda xp, v: v[0], ""))
SUB = _binary("Sub", lambda xp, v: v[0] - v[1], (lambda xp, v: v[0], ""), (lambda xp, v: -v[0], ""))
MUL = _binary(
    "Mul",
    lambda xp, v: v[0] * v[1],
    (lambda xp, v: v[0] * v[1], "r"),
    (lambda xp, v: v[0] * v[1], "l"),
)
DIV = _binary(
    "Div",
    _divide,
    (lambda xp, v: v[0] / v[1], "r"),
    (lambda xp, v: -v[0] * v[1] / (v[2] * v[2]), "lr"),
)
FMOD = _binary(
    "Fmod",
    lambda xp, v: xp.fmod(v[0], v[1]),
    (lambda xp, v: v[0], ""),
    (lambda xp, v: -v[0] * xp.trunc(v[1] / v[2]), "lr"),
)
POW = _binary("Pow", _power, (_power_of_base, "lr"), (_power_of_exponent, "lo"))

ADD_LHS_INPLACE = in_place(ADD, "AddLhsInplace")


def _compare(op_type: str, compute: Function) -> Definition:
    return Definition(
        op_type,
        infer=_one_bool,
        run=_plain(compute),
        gradient=lambda site: [None, None],
        names=("lhs", "rhs"),
    )


EQUAL = _compare("Equal", lambda xp, v: v[0] == v[1])
GREATER = _compare("Greater", lambda xp, v: v[0] > v[1])
AND = _compare("And", lambda xp, v: xp.logical_and(v[0], v[1]))
OR = _compare("Or", lambda xp, v: xp.logical_or(v[0], v[1]))


# Any number of inputs


def _add_all(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    if len(inputs) == 1:
        return [inputs[0]]
    values = [wide(x) for x in aligned(*inputs)]
    added = values[0] + values[1]
    for value in values[2:]:
        added = added + value
    return [narrow(added, inputs[0].dtype)]


def _each_gradient(definition: Definition, *names: str) -> Callable[[GradientSite], list[Any]]:
    """The rule of an op that takes any number of inputs and treats them alike."""

    def rule(site: GradientSite) -> list[Any]:
        out: list[Any] = []
        for index, tensor in enumerate(site.op.inputs):
            if not site.needs(index):
                out.append(None)
                continue
            given = [site.gradient(0)]
            if "values" in names:
                given += [site.input(index), site.output(0)]
            spec = tensor.spec
            out += add_op(definition, given, {"shape": spec.shape, "dtype": spec.dtype})
        return out

    return rule


SUM_GRAD = _reduced("SumArgGrad", lambda xp, v: v[0])
SUM = Definition("Sum", infer=_one_spec, run=_add_all, gradient=_each_gradient(SUM_GRAD))


def _largest(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    found, *others = aligned(*inputs)
    for other in others:
        found = xp.maximum(found, other)
    return [found]


# As PopART: each input that is the largest gets the whole gradient, also where several are.
MAX_GRAD = _reduced("MaxArgGrad", lambda xp, v: xp.where(v[1] == v[2], v[0], 0))
MAX = Definition(
    "Max",
    infer=_one_spec,
    run=_largest,
    gradient=_each_gradient(MAX_GRAD, "values"),
    names=("ts_0", "ts_1"),
)


# Where


def _where_spec(inputs: Specs, attributes: Attributes) -> Specs:
    condition, lhs, rhs = inputs
    chosen = broadcast_spec([lhs, rhs])
    as_condition = TensorSpec(condition.shape, chosen.dtype)
    return [broadcast_spec([as_condition, chosen])]


def _where(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    return [xp.where(*aligned(*inputs))]


def _chosen(op_type: str, when: bool) -> Definition:
    def run(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
        dy, condition = aligned(*inputs)
        chosen = xp.where(condition, dy, 0) if when else xp.where(condition, 0, dy)
        return [unbroadcast(xp, narrow(chosen, dy.dtype), attributes["shape"])]

    return Definition(op_type, infer=shape_spec, run=run)


WHERE_X_GRAD = _chosen("WhereXGrad", True)
WHERE_Y_GRAD = _chosen("WhereYGrad", False)
WHERE = Definition(
    "Where",
    infer=_where_spec,
    run=_where,
    gradient=_gradient_of(None, (WHERE_X_GRAD, "l"), (WHERE_Y_GRAD, "l")),
    names=("condition", "lhs", "rhs"),
)


# aX + bY: the two may have different types; the factors are attributes, or a third and fourth input


def _scaled_spec(inputs: Specs, attributes: Attributes) -> Specs:
    if inputs[0].shape != inputs[1].shape:
        raise ValueError(
            f"X and Y must have the same shape, but they have {inputs[0].shape} and "
            f"{inputs[1].shape}"
        )
    return [TensorSpec(inputs[0].shape, inputs[0].dtype)]


def scaled_add(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    """[a * X + b * Y], in the wider type of the two and at least float32, in X's type."""
    x, y = wide(inputs[0]), wide(inputs[1])
    factors = iter(inputs[2:])
    scaled = []
    for value, name in ((x, "a"), (y, "b")):
        factor = attributes[name]
        if factor is None:
            factor = aligned(wide(next(factors)), value)[0]
            factor = narrow(factor.reshape(-1, *(1,) * (value.ndim - 1)), value.dtype)
        scaled.append(value if isinstance(factor, float) and factor == 1 else value * factor)
    return [narrow(scaled[0] + scaled[1], inputs[0].dtype)]


def _scaled_gradient(site: GradientSite) -> list[Any]:
    out: list[Any] = []
    factors = iter(range(2, len(site.op.inputs)))
    for index, name in enumerate("ab"):
        factor = site.attributes[name]
        number = next(factors) if factor is None else None
        if not site.needs(index):
            out.append(None)
            continue
        given = [site.gradient(0)] + ([] if number is None else [site.input(number)])
        dtype = site.op.inputs[index].dtype
        out += add_op(SCALE, given, {"factor": factor, "dtype": dtype})
    return out + [None] * (len(site.op.inputs) - 2)


def _scale_spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [TensorSpec(inputs[0].shape, attributes["dtype"])]


def _scale(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    x = wide(inputs[0])
    factor = attributes["factor"]
    if factor is None:
        factor = narrow(inputs[1].reshape(-1, *(1,) * (x.ndim - 1)), x.dtype)
    return [narrow(x * factor, attributes["dtype"].as_numpy())]


SCALE = Definition("Scale", infer=_scale_spec, run=_scale)
SCALED_ADD = Definition(
    "ScaledAdd",
    infer=_scaled_spec,
    run=scaled_add,
    gradient=_scaled_gradient,
    names=("X", "Y"),
)
SCALED_ADD_INPLACE = in_place(SCALED_ADD, "ScaledAddLhsInplace")
