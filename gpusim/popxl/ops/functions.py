"""Functions of single elements: exponentials, logarithms, trigonometry, rounding and limits."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from .._definition import Array, Attributes, add_op
from ..tensor import Tensor
from ._elementwise import flat, in_place, unary

__all__ = [
    "exp",
    "exp_",
    "log",
    "log2",
    "sqrt",
    "sin",
    "cos",
    "tanh",
    "ceil",
    "floor",
    "clip",
    "clamp",
]

EXP = unary("Exp", lambda xp, x, a: xp.exp(x), lambda xp, y, a: y, of="y")
EXP_INPLACE = in_place(EXP, "ExpInplace")


def exp(t: Tensor) -> Tensor:
    """The exponential of each element.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.exp(popxl.constant([0.0, 1.0]))
    Tensor[exp_out popxl.dtypes.float32 (2,)]
    """
    return add_op(EXP, [t])[0]


def exp_(t: Tensor) -> Tensor:
    """`exp` in place: `t` changes, and the result shares its memory.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.exp_(popxl.constant([0.0, 1.0]))
    Tensor[expinplace_out popxl.dtypes.float32 (2,)]
    """
    return add_op(EXP_INPLACE, [t])[0]


LOG = unary("Log", lambda xp, x, a: xp.log(x), lambda xp, x, a: 1 / x)
LOG2 = unary("Log2", lambda xp, x, a: xp.log2(x), lambda xp, x, a: float(1 / np.log(2)) / x)


def log(t: Tensor) -> Tensor:
    """The natural logarithm of each element.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.log(popxl.constant([1.0, 2.0]))
    Tensor[log_out popxl.dtypes.float32 (2,)]
    """
    return add_op(LOG, [t])[0]


def log2(t: Tensor) -> Tensor:
    """The logarithm of each element to the base 2.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.log2(popxl.constant([1.0, 2.0]))
    Tensor[log2_out popxl.dtypes.float32 (2,)]
    """
    return add_op(LOG2, [t])[0]


SQRT = unary("Sqrt", lambda xp, x, a: xp.sqrt(x), lambda xp, y, a: 0.5 / y, of="y")


def sqrt(t: Tensor) -> Tensor:
    """The square root of each element.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.sqrt(popxl.constant([4.0, 1.0]))
    Tensor[sqrt_out popxl.dtypes.float32 (2,)]
    """
    return add_op(SQRT, [t])[0]


SIN = unary("Sin", lambda xp, x, a: xp.sin(x), lambda xp, x, a: xp.cos(x))


def sin(t: Tensor) -> Tensor:
    """The sine of each element, in radians.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.sin(popxl.constant([0.0, 1.0]))
    Tensor[sin_out popxl.dtypes.float32 (2,)]
    """
    return add_op(SIN, [t])[0]


COS = unary("Cos", lambda xp, x, a: xp.cos(x), lambda xp, x, a: -xp.sin(x))


def cos(t: Tensor) -> Tensor:
    """The cosine of each element, in radians.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.cos(popxl.constant([0.0, 1.0]))
    Tensor[cos_out popxl.dtypes.float32 (2,)]
    """
    return add_op(COS, [t])[0]


TANH = unary("Tanh", lambda xp, x, a: xp.tanh(x), lambda xp, y, a: 1 - y * y, of="y")


def tanh(t: Tensor) -> Tensor:
    """The hyperbolic tangent of each element.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.tanh(popxl.constant([0.0, 1.0]))
    Tensor[tanh_out popxl.dtypes.float32 (2,)]
    """
    return add_op(TANH, [t])[0]


CEIL = flat("Ceil", lambda xp, x, a: xp.ceil(x))


def ceil(t: Tensor) -> Tensor:
    """Round each element up to an integer. The gradient is zero.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.ceil(popxl.constant([-1.5, 2.2]))
    Tensor[ceil_out popxl.dtypes.float32 (2,)]
    """
    return add_op(CEIL, [t])[0]


FLOOR = flat("Floor", lambda xp, x, a: xp.floor(x))


def floor(t: Tensor) -> Tensor:
    """Round each element down to an integer. The gradient is zero.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.floor(popxl.constant([-1.5, 2.2]))
    Tensor[floor_out popxl.dtypes.float32 (2,)]
    """
    return add_op(FLOOR, [t])[0]


def _clip(xp: ModuleType, x: Array, attributes: Attributes) -> Array:
    return xp.minimum(xp.maximum(x, attributes["min"]), attributes["max"])


def _clip_slope(xp: ModuleType, x: Array, attributes: Attributes) -> Array:
    return ((x >= attributes["min"]) & (x <= attributes["max"])).astype(x.dtype)


CLIP = unary("Clip", _clip, _clip_slope)


def clip(t: Tensor, min: float = float("-inf"), max: float = float("inf")) -> Tensor:
    """Limit each element to `min` and `max`. Beyond a limit the gradient is zero.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.clip(popxl.constant([-3.0, 0.5]), min=-1.0, max=1.0)
    Tensor[clip_out popxl.dtypes.float32 (2,)]
    """
    return add_op(CLIP, [t], {"min": float(min), "max": float(max)})[0]


clamp = clip
