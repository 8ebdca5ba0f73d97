"""Matrix products, by NumPy's rules for ranks: one product for all replicas.
Products and sums are made in float32 or wider, and rounded once to the type of the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from ..tensor import TensorSpec
from .definition import Definition, GradientSite, add_op
from .stacked import Array, narrow, raise_rank, unbroadcast

Attributes = Mapping[str, Any]
Specs = list[TensorSpec]
Shape = tuple[int, ...]


def product_shape(lhs: Shape, rhs: Shape) -> Shape:
    """The shape of a matrix product; ValueError where there is none.

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
    """An array in the type that its products are added up in."""
    return x.astype(np.float32) if x.dtype.itemsize < 4 and x.dtype.kind not in "iub" else x


def _matrices(lhs: Array, rhs: Array) -> tuple[Array, Array]:
    """[R, *batch, n, k] and [R, *batch, k, m], with the batches of one rank."""
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


def _matmul(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    out = multiply(xp, inputs[0], inputs[1])
    if len(inputs) == 3:
        scale = inputs[2].reshape(-1, *(1,) * (out.ndim - 1))
        out = xp.ldexp(out, scale)
    dtype = attributes["output_type"]
    return [narrow(out, inputs[0].dtype if dtype is None else dtype.as_numpy())]


def _gradient_spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [TensorSpec(tuple(attributes["shape"]), attributes["dtype"])]


def _gradient(side: int) -> Definition:
    def run(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
        dy, other = inputs
        shape, whole = tuple(attributes["shape"]), tuple(attributes["product"])
        lhs_rank = len(shape) if side == 0 else other.ndim - 1
        rhs_rank = other.ndim - 1 if side == 0 else len(shape)
        # The product's matrices again, also where a vector has made them rows or columns.
        dy = dy.reshape(dy.shape[0], *whole)
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
    return Definition(name, infer=_gradient_spec, run=run)


def _build_gradient(site: GradientSite) -> list[Any]:
    out: list[Any] = []
    for side, grad in enumerate((LHS_GRAD, RHS_GRAD)):
        if not site.needs(side):
            out.append(None)
            continue
        spec = site.op.inputs[side].spec
        product = site.op.outputs[0].shape
        attributes = {"shape": spec.shape, "dtype": spec.dtype, "product": product}
        out += add_op(grad, [site.gradient(0), site.input(1 - side)], attributes)
    return out


LHS_GRAD = _gradient(0)
RHS_GRAD = _gradient(1)
MATMUL = Definition(
    "MatMul", infer=_spec, run=_matmul, gradient=_build_gradient, names=("lhs", "rhs")
)
#: Of 8-bit floats, times a power of two; it has no gradient, as in PopART.
MATMUL_POW2SCALED = Definition(
    "MatMul", infer=_spec, run=_matmul, names=("lhs", "rhs", "log2_scale")
)
