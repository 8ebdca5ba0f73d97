"""Activation functions: relu, gelu by tanh and by the error function, swish."""

from __future__ import annotations

import math
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from .._definition import Array, Attributes, add_op
from ..tensor import Tensor
from ._elementwise import in_place, unary

__all__ = ["relu", "relu_", "gelu", "gelu_", "geluerf", "geluerf_", "swish", "swish_"]

RELU = unary(
    "Relu", lambda xp, x, a: xp.maximum(x, 0), lambda xp, y, a: (y > 0).astype(y.dtype), "y"
)
RELU_INPLACE = in_place(RELU, "ReluInplace")


def relu(t: Tensor) -> Tensor:
    """The maximum of each element and 0.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.relu(popxl.constant([1.0, -2.0]))
    Tensor[relu_out popxl.dtypes.float32 (2,)]
    """
    return add_op(RELU, [t])[0]


def relu_(t: Tensor) -> Tensor:
    """`relu` in place: `t` changes, and the result shares its memory.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.relu_(popxl.constant([1.0, -2.0]))
    Tensor[reluinplace_out popxl.dtypes.float32 (2,)]
    """
    return add_op(RELU_INPLACE, [t])[0]


# Gelu by tanh

_SQRT_2_OVER_PI = 0.7978845608028654
_CUBE = 0.044715  # gelu's, as in the paper that proposed it


def _gelu_inner(xp: ModuleType, x: Array) -> Array:
    return xp.tanh(_SQRT_2_OVER_PI * (x + _CUBE * x * x * x))


def _gelu_slope(xp: ModuleType, x: Array, attributes: Attributes) -> Array:
    t = _gelu_inner(xp, x)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _SQRT_2_OVER_PI * (1 + 3 * _CUBE * x * x)


GELU = unary("Gelu", lambda xp, x, a: 0.5 * x * (1 + _gelu_inner(xp, x)), _gelu_slope)
GELU_INPLACE = in_place(GELU, "GeluInplace")


def gelu(t: Tensor) -> Tensor:
    """The Gaussian error linear unit, by the approximation with tanh.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.gelu(popxl.constant([-1.0, 1.0]))
    Tensor[gelu_out popxl.dtypes.float32 (2,)]
    """
    return add_op(GELU, [t])[0]


def gelu_(t: Tensor) -> Tensor:
    """`gelu` in place: `t` changes, and the result shares its memory.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.gelu_(popxl.constant([-1.0, 1.0]))
    Tensor[geluinplace_out popxl.dtypes.float32 (2,)]
    """
    return add_op(GELU_INPLACE, [t])[0]


# Gelu by the error function, which NumPy lacks: a polynomial in x**2, fitted to the C library's.
# CuPy's arrays take the same polynomial, so that both differ by a few units of 1e-12 at most.

_LIMIT = 5.0  # beyond it erf is 1 within 1.6e-12
_DEGREE = 32  # higher degrees are not more accurate


@cache
def _coefficients() -> tuple[float, ...]:
    """Chebyshev coefficients of erf(x) / x as a function of x**2 from 0 to _LIMIT**2."""

    def ratio(places: Any) -> Any:
        squares = (places + 1) * (_LIMIT**2 / 2)
        return np.array([math.erf(math.sqrt(s)) / math.sqrt(s) for s in squares])

    return tuple(np.polynomial.chebyshev.chebinterpolate(ratio, _DEGREE).tolist())


def erf(xp: ModuleType, x: Any) -> Any:
    """The error function in float64.

    >>> bool(abs(erf(np, np.array([0.5, -7.0])) - [math.erf(0.5), -1]).max() < 1e-11)
    True
    """
    bounded = xp.clip(x.astype(np.float64), -_LIMIT, _LIMIT)
    twice = bounded * bounded * (4 / _LIMIT**2) - 2  # Clenshaw's recurrence
    high = low = xp.zeros_like(bounded)
    coefficients = _coefficients()
    for coefficient in reversed(coefficients[1:]):
        high, low = twice * high - low + coefficient, high
    return bounded * (twice / 2 * high - low + coefficients[0])


def _gelu_erf(xp: ModuleType, x: Array, attributes: Attributes) -> Array:
    return x * (0.5 * (1 + erf(xp, x * 2**-0.5))).astype(x.dtype)


def _gelu_erf_slope(xp: ModuleType, x: Array, attributes: Attributes) -> Array:
    density = xp.exp(-0.5 * x * x) * (0.5 * _SQRT_2_OVER_PI)
    return (0.5 * (1 + erf(xp, x * 2**-0.5))).astype(x.dtype) + x * density


GELU_ERF = unary("GeluErf", _gelu_erf, _gelu_erf_slope)
GELU_ERF_INPLACE = in_place(GELU_ERF, "GeluErfInplace")


def geluerf(t: Tensor) -> Tensor:
    """The Gaussian error linear unit, by the error function.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.geluerf(popxl.constant([-1.0, 1.0]))
    Tensor[geluerf_out popxl.dtypes.float32 (2,)]
    """
    return add_op(GELU_ERF, [t])[0]


def geluerf_(t: Tensor) -> Tensor:
    """`geluerf` in place: `t` changes, and the result shares its memory.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.geluerf_(popxl.constant([-1.0, 1.0]))
    Tensor[geluerfinplace_out popxl.dtypes.float32 (2,)]
    """
    return add_op(GELU_ERF_INPLACE, [t])[0]


# Swish


def sigmoid(xp: ModuleType, x: Array) -> Array:
    """1 / (1 + exp(-x)), by the exponential that does not overflow."""
    small = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1 / (1 + small), small / (1 + small))


def _swish_slope(xp: ModuleType, x: Array, attributes: Attributes) -> Array:
    s = sigmoid(xp, x)
    return s + x * s * (1 - s)


SWISH = unary("Swish", lambda xp, x, a: x * sigmoid(xp, x), _swish_slope)
SWISH_INPLACE = in_place(SWISH, "SwishInplace")


def swish(t: Tensor) -> Tensor:
    """Each element times its logistic function (also called SiLU).

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.swish(popxl.constant([1.0, -2.0]))
    Tensor[swish_out popxl.dtypes.float32 (2,)]
    """
    return add_op(SWISH, [t])[0]


def swish_(t: Tensor) -> Tensor:
    """`swish` in place: `t` changes, and the result shares its memory.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.swish_(popxl.constant([1.0, -2.0]))
    Tensor[swishinplace_out popxl.dtypes.float32 (2,)]
    """
    return add_op(SWISH_INPLACE, [t])[0]
