"""Conversions between dtypes; those of 8-bit floats multiply by a power of two on the way.

A conversion to a floating-point dtype rounds once. A value too large for an 8-bit float becomes
NaN, as on an IPU.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from gpusim.libraries import to_host, to_library_of
from gpusim.rounding import round_to

from .. import dtypes
from .._definition import Array, Arrays, Attributes, Definition, Specs, add_op, gradient_ops
from ..dtypes import dtype, float16, float32, int32
from ..tensor import Tensor, TensorSpec

__all__ = ["cast", "pow2scale_cast_to_fp8", "pow2scale_cast_from_fp8"]

FLOAT8 = (dtypes.float8_143, dtypes.float8_152)


def _spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [TensorSpec(inputs[0].shape, attributes["dtype"])]


def _cast(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    return [inputs[0].astype(attributes["dtype"].as_numpy(), copy=False)]


CAST_GRAD = Definition("CastGrad", _spec, _cast)
CAST = Definition("Cast", _spec, _cast, gradient_ops((CAST_GRAD, "")))


def cast(t: Tensor, data_type: dtype) -> Tensor:
    """Convert `t` to another dtype. Floating-point numbers round to zero on the way to integers.

    **Raises**: TypeError: for 8-bit floats; use `pow2scale_cast_to_fp8` and `_from_fp8` instead.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.cast(popxl.constant([1.7, -1.7]), popxl.int32)
    Tensor[t_int32 popxl.dtypes.int32 (2,)]
    """
    for each in (t.dtype, data_type):
        if each in FLOAT8:
            raise TypeError(
                f"Data type {each} not supported for popxl.ops.cast, please consider "
                "pow2scale_cast_to_fp8 or pow2scale_cast_from_fp8"
            )
    return _add_cast(CAST, [t], data_type)


# 8-bit floats


def _scale_of(scales: Array, rank: int) -> np.ndarray[Any, Any]:
    """2 ** log2_scale of each replica, shaped to broadcast to its tensor."""
    return np.ldexp(np.float64(1), to_host(scales)).reshape(-1, *(1,) * rank)


def _scaled_cast(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    t, scales = inputs
    scaled = to_host(t).astype(np.float64) * _scale_of(scales, t.ndim - 1)  # exact
    return [to_library_of(t, round_to(scaled, attributes["dtype"].as_numpy()))]


POW2SCALE_THEN_CAST = Definition(
    "Pow2ScaleThenCast", _spec, _scaled_cast, names=("t", "log2_scale")
)
CAST_THEN_POW2SCALE = Definition(
    "CastThenPow2Scale", _spec, _scaled_cast, names=("t", "log2_scale")
)


def pow2scale_cast_to_fp8(t: Tensor, log2_scale: Tensor, data_type: dtype) -> Tensor:
    """``t * 2 ** log2_scale`` as an 8-bit float, rounded once. Too large values become NaN.

    **Arguments**

    - `t`: a tensor of float16 or float32.
    - `log2_scale`: a scalar of int32, -32 to 31.
    - `data_type`: `popxl.float8_143` or `popxl.float8_152`.

    **Raises**

    - ValueError: if `log2_scale` is not a scalar.
    - TypeError: if `log2_scale` is not int32, or for other dtypes.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant([0.5, 3.0], popxl.float16)
    ...     popxl.ops.pow2scale_cast_to_fp8(t, popxl.constant(1, popxl.int32), popxl.float8_143)
    Tensor[t_float8_143 popxl.dtypes.float8_143 (2,)]
    """
    check_log2_scale(log2_scale)
    if data_type not in FLOAT8:
        raise TypeError(f"Data type {data_type} not supported for popxl.ops.cast")
    if t.dtype not in (float16, float32):
        raise TypeError(f"Data type {t.dtype} not supported for popxl.ops.cast")
    return _add_cast(POW2SCALE_THEN_CAST, [t, log2_scale], data_type)


def pow2scale_cast_from_fp8(t: Tensor, log2_scale: Tensor, data_type: dtype) -> Tensor:
    """An 8-bit float times ``2 ** log2_scale``, as float16 or float32, rounded once.

    Arguments and errors as in `pow2scale_cast_to_fp8`, with the dtypes exchanged.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant([0.5, 3.0], popxl.float8_152)
    ...     popxl.ops.pow2scale_cast_from_fp8(t, popxl.constant(1, popxl.int32), popxl.float16)
    Tensor[t_float16 popxl.dtypes.float16 (2,)]
    """
    check_log2_scale(log2_scale)
    if data_type not in (float16, float32):
        raise TypeError(f"Data type {data_type} not supported for popxl.ops.cast")
    if t.dtype not in FLOAT8:
        raise TypeError(f"Data type {t.dtype} not supported for popxl.ops.cast")
    return _add_cast(CAST_THEN_POW2SCALE, [t, log2_scale], data_type)


def _add_cast(definition: Definition, inputs: list[Tensor], data_type: dtype) -> Tensor:
    name = f"{inputs[0].name}_{data_type.name}"
    return add_op(definition, inputs, {"dtype": data_type}, output_names=[name])[0]


def check_log2_scale(log2_scale: Tensor) -> None:
    """Raise ValueError or TypeError if a scale is not a scalar of int32."""
    if log2_scale.rank > 0:
        raise ValueError("Log2 scale argument must be a scalar tensor")
    if log2_scale.dtype is not int32:
        raise TypeError("Log2 scale tensor must be of type popxl.int32")
