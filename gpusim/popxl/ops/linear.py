"""Matrix products by NumPy's rules for ranks, one product for all replicas.

Products and sums are computed in float32 or wider, and rounded once to the dtype of the result.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from .. import dtypes
from .._definition import (
    Array,
    Arrays,
    Attributes,
    Definition,
    Specs,
    add_op,
    gradient_ops,
    shape_spec,
)
from ..context import get_ir
from ..tensor import Tensor, TensorSpec
from ._stacked import Shape, narrow, raise_rank, unbroadcast
from .casts import FLOAT8, check_log2_scale

__all__ = ["matmul", "matmul_pow2scaled"]


def product_shape(lhs: Shape, rhs: Shape) -> Shape:
    """The shape of a matrix product; ValueError if the shapes do not fit.

    >>> product_shape((5, 2, 3), (3, 4)), product_shape((3,), (3,))
    ((5, 2, 4), ())
    """
    if not lhs or not rhs:
        raise ValueError(f"matmul needs tensors of rank 1 at least, but got {lhs} and {rhs}")
    rows = () if len(lhs) == 1 else (lhs[-2],)
    columns = () if len(rhs) == 1 else (rhs[-1],)
    inner = rhs[0] if len(rhs) == 1 else rhs[-2]
    try:
        batch = np.broadcast_shapes(lhs[:-2], rhs[:-2])
    except ValueError:
        batch = None
    if lhs[-1] != inner or batch is None:
        raise ValueError(f"The shapes {lhs} and {rhs} cannot be multiplied as matrices")
    return (*batch, *rows, *columns)


def _spec(inputs: Specs, attributes: Attributes) -> Specs:
    lhs, rhs = inputs[:2]
    if lhs.dtype != rhs.dtype and len(inputs) == 2:  # 8-bit floats may mix
        raise TypeError(
            f"lhs and rhs must have one data type, but they have {lhs.dtype.name} and "
            f"{rhs.dtype.name}: use ops.cast"
        )
    return [TensorSpec(product_shape(lhs.shape, rhs.shape), attributes["output_type"] or lhs.dtype)]


def _operand(x: Array) -> Array:
    """An array in the dtype in which its products are added."""
    return x.astype(np.float32) if x.dtype.itemsize < 4 and x.dtype.kind not in "iub" else x


def _matrices(lhs: Array, rhs: Array) -> tuple[Array, Array]:
    """[R, *batch, n, k] and [R, *batch, k, m], with batches of one rank."""
    lhs = lhs[:, None, :] if lhs.ndim == 2 else lhs
    rhs = rhs[:, :, None] if rhs.ndim == 2 else rhs
    rank = max(lhs.ndim, rhs.ndim) - 1
    return raise_rank(lhs, rank), raise_rank(rhs, rank)


def multiply(xp: ModuleType, lhs: Array, rhs: Array) -> Array:
    """The matrix products of the replicas' values, [R, *product_shape]."""
    left, right = _matrices(_operand(lhs), _operand(rhs))
    out = xp.matmul(left, right)
    if lhs.ndim > 2 and rhs.ndim > 2:
        return out
    return out.reshape(out.shape[0], *product_shape(lhs.shape[1:], rhs.shape[1:]))


def _matmul(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    out = multiply(xp, inputs[0], inputs[1])
    if len(inputs) == 3:
        scale = inputs[2].reshape(-1, *(1,) * (out.ndim - 1))
        out = xp.ldexp(out, scale)
    dtype = attributes["output_type"]
    return [narrow(out, inputs[0].dtype if dtype is None else dtype.as_numpy())]


def _gradient(side: int) -> Definition:
    def run(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
        dy, other = inputs
        shape = attributes["shape"]
        lhs_rank = len(shape) if side == 0 else other.ndim - 1
        rhs_rank = other.ndim - 1 if side == 0 else len(shape)
        # The product as matrices, also if a vector has made rows or columns of them.
        if rhs_rank == 1:
            dy = dy[..., None]
        if lhs_rank == 1:
            dy = dy[..., None, :]
        if other.ndim == 2:
            other = other[:, :, None] if side == 0 else other[:, None, :]
        rank = max(dy.ndim, other.ndim) - 1
        dy, other = raise_rank(_operand(dy), rank), raise_rank(_operand(other), rank)
        turned = other.swapaxes(-1, -2)
        out = xp.matmul(dy, turned) if side == 0 else xp.matmul(turned, dy)
        matrix = shape
        if len(shape) == 1:
            matrix = (1, *shape) if side == 0 else (*shape, 1)
        out = unbroadcast(xp, out, matrix).reshape(dy.shape[0], *shape)
        return [narrow(out, attributes["dtype"].as_numpy())]

    name = ("MatMulLhsGrad", "MatMulRhsGrad")[side]
    return Definition(name, shape_spec, run)


LHS_GRAD = _gradient(0)
RHS_GRAD = _gradient(1)
MATMUL = Definition(
    "MatMul", _spec, _matmul, gradient_ops((LHS_GRAD, "1"), (RHS_GRAD, "0")), names=("lhs", "rhs")
)
#: For 8-bit floats, times a power of two. It has no gradient, as in PopART.
MATMUL_POW2SCALED = Definition("MatMul", _spec, _matmul, names=("lhs", "rhs", "log2_scale"))


def matmul(
    lhs: Tensor,
    rhs: Tensor,
    available_memory_proportion: float | None = None,
    output_type: dtypes.dtype | None = None,
    partials_type: dtypes.dtype | None = None,
) -> Tensor:
    """The matrix product, by NumPy's rules for ranks other than two.

    **Arguments**

    - `available_memory_proportion`: an option of an IPU; no effect here.
    - `output_type`: the dtype of the result, by default that of the inputs.
    - `partials_type`: `popxl.float16` or `popxl.float32`; no effect here: sums are always in
      float32 or wider, and rounded once.

    **Raises**

    - TypeError: if the dtypes differ.
    - ValueError: if the shapes do not fit, or for another `partials_type`.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     lhs, rhs = popxl.constant(np.ones((5, 2, 3))), popxl.constant(np.ones((3, 4)))
    ...     popxl.ops.matmul(lhs, rhs)
    Tensor[matmul_out popxl.dtypes.float32 (5, 2, 4)]
    """
    if partials_type is None:
        _check_option(getattr(get_ir().getSessionOptions(), "partialsTypeMatMuls", ""))
    elif partials_type not in (dtypes.float16, dtypes.float32):
        raise ValueError(f"dtype {partials_type} is not valid, must be float16 or float32")
    return add_op(MATMUL, [lhs, rhs], {"output_type": output_type})[0]


def matmul_pow2scaled(
    lhs: Tensor, rhs: Tensor, log2_scale: Tensor, available_memory_proportion: float | None = None
) -> Tensor:
    """The matrix product of 8-bit floats, times ``2 ** log2_scale``, as float16.

    **Arguments**: `log2_scale`: a scalar of int32, -32 to 31.

    **Raises**

    - TypeError: for other dtypes.
    - ValueError: if the scale is not a scalar, or the shapes do not fit.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.ones((2, 2)), popxl.float8_143)
    ...     popxl.ops.matmul_pow2scaled(t, t, popxl.constant(1, popxl.int32))
    Tensor[matmul_out popxl.dtypes.float16 (2, 2)]
    """
    if lhs.dtype not in FLOAT8 or rhs.dtype not in FLOAT8:
        raise TypeError(
            "Scaled matmul operands must be of dtype popxl.float8_143 or popxl.float8_152"
        )
    check_log2_scale(log2_scale)
    attributes = {"output_type": dtypes.float16}
    return add_op(MATMUL_POW2SCALED, [lhs, rhs, log2_scale], attributes)[0]


def _check_option(partials_type: Any) -> None:
    if str(partials_type or "").lower() not in ("", "float", "half"):
        raise ValueError(f"str {partials_type} is not valid, must be 'float' or 'half'")
