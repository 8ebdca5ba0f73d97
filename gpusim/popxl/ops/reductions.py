"""Ops that make one value of many along axes: sums, products, norms, extremes and medians.

All of them reduce one trailing axis of an array [R, *others, n], and add float16 in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
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
    same_spec,
    shape_spec,
)
from ..tensor import Tensor, TensorSpec, constant
from ._elementwise import broadcast_gradient, one_spec
from ._stacked import add_up, align, flatten_axes, narrow, normal_axes, reduced_shape, wide
from .utils import one_axis

__all__ = [
    "sum",
    "mean",
    "sumsquare",
    "l1",
    "l2",
    "logsum",
    "logsumexp",
    "lamb_square",
    "prod",
    "max",
    "maximum",
    "min",
    "median",
    "cumsum",
]


def _axes(spec: TensorSpec, attributes: Attributes) -> tuple[int, ...]:
    return normal_axes(attributes["axes"], len(spec.shape))


def _reduced_spec(inputs: Specs, attributes: Attributes) -> Specs:
    (spec,) = inputs
    axes = _axes(spec, attributes)
    return [TensorSpec(reduced_shape(spec.shape, axes, attributes["keepdims"]), spec.dtype)]


def _along(x: Array, attributes: Attributes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of a reduction, and the shape [R, *...] of its result with keepdims."""
    axes = normal_axes(attributes["axes"], x.ndim - 1)
    return axes, (x.shape[0], *reduced_shape(x.shape[1:], axes, True))


Fold = Callable[[ModuleType, Array], Array]
Share = Callable[[ModuleType, Array, Array, Array], Array]


def _folding(fold: Fold) -> Callable[..., Arrays]:
    def run(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
        (x,) = inputs
        axes, _ = _along(x, attributes)
        folded = narrow(fold(xp, flatten_axes(xp, wide(x), axes)), x.dtype)
        shape = reduced_shape(x.shape[1:], axes, attributes["keepdims"])
        return [folded.reshape(x.shape[0], *shape)]

    return run


def _reduction(op_type: str, fold: Fold, share: Share | None = None) -> Definition:
    """A reduction. `share` is the gradient as a function of dy, x and y, broadcast together."""
    if share is None:
        return Definition(op_type, _reduced_spec, _folding(fold))

    def run_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
        dy, x, y = inputs
        _, shape = _along(x, attributes)
        gradient = share(xp, wide(dy).reshape(shape), wide(x), wide(y).reshape(shape))
        return [narrow(gradient, x.dtype)]

    grad = Definition(f"{op_type}Grad", shape_spec, run_gradient)

    return Definition(op_type, _reduced_spec, _folding(fold), gradient_ops((grad, "xy")))


def reduced_axes(axis: int | Iterable[int] | None, keepdims: bool) -> dict[str, Any]:
    """The attributes of a reduction."""
    axes = axis if axis is None or isinstance(axis, int) else tuple(axis)
    return {"axes": axes, "keepdims": bool(keepdims)}


# Sums and means


def _sum_or_mean(op_type: str, fold: Fold, mean: bool) -> Definition:
    """A sum or mean: its gradient is that of the output, repeated."""

    def run_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
        (dy,) = inputs
        shape = tuple(attributes["shape"])
        axes = normal_axes(attributes["axes"], len(shape))
        if mean:
            dy = narrow(wide(dy) / math.prod(shape[i] for i in axes), dy.dtype)
        rows = dy.reshape(dy.shape[0], *reduced_shape(shape, axes, True))
        return [xp.broadcast_to(rows, (dy.shape[0], *shape))]

    grad = Definition(f"{op_type}Grad", shape_spec, run_gradient)

    return Definition(op_type, _reduced_spec, _folding(fold), gradient_ops((grad, "")))


REDUCE_SUM = _sum_or_mean("ReduceSum", add_up, mean=False)


def sum(t: Tensor, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
    """The sum along axes.

    **Arguments**

    - `axis`: one axis or several; a negative one counts from the end. By default all axes.
    - `keepdims`: whether the axes stay, with a length of 1.

    float16 is added in float32.

    **Raises**: ValueError: if `t` has no such axis.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.sum(popxl.constant([[1.0, 2.0], [3.0, 4.0]]), axis=-1)
    Tensor[reducesum_out popxl.dtypes.float32 (2,)]
    """
    return add_op(REDUCE_SUM, [t], reduced_axes(axis, keepdims))[0]


def _mean(xp: ModuleType, x: Array) -> Array:
    if x.dtype.kind == "f":
        return add_up(xp, x) / x.shape[-1]
    summed = x.sum(axis=-1, dtype=np.int64)
    return (summed - xp.fmod(summed, x.shape[-1])) // x.shape[-1]  # rounded to zero


REDUCE_MEAN = _sum_or_mean("ReduceMean", _mean, mean=True)


def mean(t: Tensor, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
    """The mean along axes; of integers, rounded to zero. Arguments and errors as in `sum`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.mean(popxl.constant([[1.0, 2.0], [3.0, 4.0]]), axis=-1)
    Tensor[reducemean_out popxl.dtypes.float32 (2,)]
    """
    return add_op(REDUCE_MEAN, [t], reduced_axes(axis, keepdims))[0]


REDUCE_SUM_SQUARE = _reduction(
    "ReduceSumSquare", lambda xp, x: add_up(xp, x * x), lambda xp, dy, x, y: dy * (x + x)
)


def sumsquare(t: Tensor, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
    """The sum of squares along axes. Arguments and errors as in `sum`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.sumsquare(popxl.constant([[1.0, 2.0], [3.0, 4.0]]), axis=-1)
    Tensor[reducesumsquare_out popxl.dtypes.float32 (2,)]
    """
    return add_op(REDUCE_SUM_SQUARE, [t], reduced_axes(axis, keepdims))[0]


REDUCE_L1 = _reduction(
    "ReduceL1", lambda xp, x: add_up(xp, xp.abs(x)), lambda xp, dy, x, y: dy * xp.sign(x)
)


def l1(t: Tensor, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
    """The sum of magnitudes along axes. Arguments and errors as in `sum`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.l1(popxl.constant([[1.0, 2.0], [3.0, 4.0]]), axis=-1)
    Tensor[reducel1_out popxl.dtypes.float32 (2,)]
    """
    return add_op(REDUCE_L1, [t], reduced_axes(axis, keepdims))[0]


REDUCE_L2 = _reduction(
    "ReduceL2", lambda xp, x: xp.sqrt(add_up(xp, x * x)), lambda xp, dy, x, y: dy * x / y
)


def l2(t: Tensor, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
    """The square root of the sum of squares along axes. Arguments and errors as in `sum`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.l2(popxl.constant([[1.0, 2.0], [3.0, 4.0]]), axis=-1)
    Tensor[reducel2_out popxl.dtypes.float32 (2,)]
    """
    return add_op(REDUCE_L2, [t], reduced_axes(axis, keepdims))[0]


REDUCE_LOG_SUM = _reduction(
    "ReduceLogSum",
    lambda xp, x: xp.log(add_up(xp, x)),
    lambda xp, dy, x, y: xp.broadcast_to(dy / xp.exp(y), x.shape),
)


def logsum(t: Tensor, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
    """The natural logarithm of the sum along axes. Arguments and errors as in `sum`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.logsum(popxl.constant([[1.0, 2.0], [3.0, 4.0]]), axis=-1)
    Tensor[reducelogsum_out popxl.dtypes.float32 (2,)]
    """
    return add_op(REDUCE_LOG_SUM, [t], reduced_axes(axis, keepdims))[0]


def _log_sum_exp(xp: ModuleType, x: Array) -> Array:
    highest = x.max(axis=-1, keepdims=True)
    finite = xp.where(xp.isfinite(highest), highest, 0)
    return xp.log(add_up(xp, xp.exp(x - finite))) + finite[..., 0]


REDUCE_LOG_SUM_EXP = _reduction(
    "ReduceLogSumExp", _log_sum_exp, lambda xp, dy, x, y: dy * xp.exp(x - y)
)


def logsumexp(t: Tensor, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
    """The logarithm of the sum of exponentials along axes. Arguments and errors as in `sum`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.logsumexp(popxl.constant([[1.0, 2.0], [3.0, 4.0]]), axis=-1)
    Tensor[reducelogsumexp_out popxl.dtypes.float32 (2,)]
    """
    return add_op(REDUCE_LOG_SUM_EXP, [t], reduced_axes(axis, keepdims))[0]


def _scalar_spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [TensorSpec((), dtypes.float32)]


def _lamb_square(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    (x,) = inputs
    row = flatten_axes(xp, x, range(x.ndim - 1)).astype(np.float32)
    return [add_up(xp, row * row)]


LAMB_SQUARE = Definition("LambSquare", _scalar_spec, _lamb_square)


def lamb_square(t: Tensor) -> Tensor:
    """The sum of the squares of all elements, as a float32 scalar for every dtype of `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.lamb_square(popxl.constant([3.0, 4.0]))
    Tensor[lambsquare_out popxl.dtypes.float32 ()]
    """
    return add_op(LAMB_SQUARE, [t])[0]


# Products


def _product_of_others(xp: ModuleType, x: Array) -> Array:
    """The product of all other elements along the last axis, correct with zeros too."""
    before = xp.cumprod(x, axis=-1)
    after = xp.cumprod(x[..., ::-1], axis=-1)[..., ::-1]
    out = xp.ones_like(x)
    out[..., 1:] = before[..., :-1]
    out[..., :-1] *= after[..., 1:]
    return out


def _product_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    dy, x = inputs
    axes, shape = _along(x, attributes)
    rank = x.ndim - 1
    order = [0, *(i + 1 for i in range(rank) if i not in axes), *(i + 1 for i in axes)]
    others = _product_of_others(xp, flatten_axes(xp, wide(x), axes))
    others = others.reshape([x.shape[i] for i in order]).transpose(np.argsort(order).tolist())
    return [narrow(wide(dy).reshape(shape) * others, x.dtype)]


PROD_GRAD = Definition("ReduceProdGrad", shape_spec, _product_gradient)
REDUCE_PROD = Definition(
    "ReduceProd",
    _reduced_spec,
    _folding(lambda xp, x: x.prod(axis=-1, dtype=x.dtype)),
    gradient_ops((PROD_GRAD, "x")),
)


def prod(t: Tensor, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
    """The product along axes. Arguments and errors as in `sum`; float16 is multiplied in float32.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.prod(popxl.constant([[1.0, 2.0], [3.0, 4.0]]), axis=-1)
    Tensor[reduceprod_out popxl.dtypes.float32 (2,)]
    """
    return add_op(REDUCE_PROD, [t], reduced_axes(axis, keepdims))[0]


# Extremes and medians


# As in PopART: every element that equals the extreme gets the whole gradient.
def _to_extremes(xp: ModuleType, dy: Array, x: Array, y: Array) -> Array:
    return xp.where(x == y, dy, xp.zeros_like(dy))


REDUCE_MAX = _reduction("ReduceMax", lambda xp, x: x.max(axis=-1), _to_extremes)


def max(t: Tensor, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
    """The greatest element along axes. Arguments and errors as in `sum`.

    Every element that equals it gets the whole gradient.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.max(popxl.constant([[1.0, 2.0], [3.0, 4.0]]), axis=-1)
    Tensor[reducemax_out popxl.dtypes.float32 (2,)]
    """
    return add_op(REDUCE_MAX, [t], reduced_axes(axis, keepdims))[0]


def _largest(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    largest, *others = align(*inputs)
    for other in others:
        largest = xp.maximum(largest, other)
    return [largest]


# As in PopART: every input that is the largest gets the whole gradient.
MAX_GRAD = broadcast_gradient("MaxArgGrad", lambda xp, v: xp.where(v[1] == v[2], v[0], 0))
MAX = Definition("Max", one_spec, _largest, gradient_ops((MAX_GRAD, "xy")), names=("ts_0", "ts_1"))


def maximum(*ts: Tensor) -> Tensor:
    """The greatest of the tensors' elements at each position. Shapes broadcast as in NumPy.

    Every tensor that has the greatest element gets the whole gradient.

    **Raises**

    - TypeError: if the dtypes differ.
    - ValueError: if the shapes do not broadcast, or there are no tensors.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.maximum(popxl.constant([1.0, 5.0]), popxl.constant(2.0))
    Tensor[max_out popxl.dtypes.float32 (2,)]
    """
    if not ts:
        raise ValueError("maximum needs one tensor at least")
    return add_op(MAX, ts)[0]


REDUCE_MIN = _reduction("ReduceMin", lambda xp, x: x.min(axis=-1), _to_extremes)


def min(t: Tensor, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
    """The least element along axes. Arguments and errors as in `sum`.

    Every element that equals it gets the whole gradient.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.min(popxl.constant([[1.0, 2.0], [3.0, 4.0]]), axis=-1)
    Tensor[reducemin_out popxl.dtypes.float32 (2,)]
    """
    return add_op(REDUCE_MIN, [t], reduced_axes(axis, keepdims))[0]


def _median_specs(inputs: Specs, attributes: Attributes) -> Specs:
    (values,) = _reduced_spec(inputs, attributes)
    return [values, TensorSpec(values.shape, dtypes.int32)]


def _median(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    (x,) = inputs
    axes, _ = _along(x, attributes)
    row = flatten_axes(xp, x, axes)
    order = xp.argsort(row, axis=-1, kind="stable")
    middle = order[..., (row.shape[-1] - 1) // 2]
    values = xp.take_along_axis(row, middle[..., None], axis=-1)
    shape = (x.shape[0], *reduced_shape(x.shape[1:], axes, attributes["keepdims"]))
    return [values.reshape(shape), middle.astype(np.int32).reshape(shape)]


def _median_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    dy, indices = inputs
    shape = tuple(attributes["shape"])
    axes = normal_axes(attributes["axes"], len(shape))
    rest = reduced_shape(shape, axes, False)
    count = math.prod(shape[i] for i in axes)
    replicas = dy.shape[0]
    positions = indices.reshape(replicas, *rest)[..., None] == xp.arange(count, dtype=np.int32)
    rows = xp.where(positions, dy.reshape(replicas, *rest)[..., None], xp.zeros((), dy.dtype))
    order = [i for i in range(len(shape)) if i not in axes] + list(axes)
    back = np.argsort(order).tolist()
    moved = rows.reshape(replicas, *(shape[i] for i in order))
    return [moved.transpose(0, *(i + 1 for i in back))]


MEDIAN_GRAD = Definition("ReduceMedianGrad", shape_spec, _median_gradient)
REDUCE_MEDIAN = Definition("ReduceMedian", _median_specs, _median, gradient_ops((MEDIAN_GRAD, "z")))


def median(t: Tensor, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
    """The middle element along axes, the lower of two. Arguments and errors as in `sum`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.median(popxl.constant([[1.0, 2.0, 5.0], [3.0, 4.0, 0.0]]), axis=-1)
    Tensor[reducemedian_out popxl.dtypes.float32 (2,)]
    """
    return add_op(REDUCE_MEDIAN, [t], reduced_axes(axis, keepdims))[0]


# Running sums


def _running(xp: ModuleType, x: Array, axis: int) -> Array:
    return narrow(xp.cumsum(wide(x), axis=axis, dtype=wide(x[:0]).dtype), x.dtype)


def _cumsum(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    x = inputs[0]  # the second input is the axis, as in PopART; it is an attribute as well
    (axis,) = normal_axes(attributes["axis"], x.ndim - 1)
    return [_running(xp, x, axis + 1)]


def _cumsum_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    (dy,) = inputs
    (axis,) = normal_axes(attributes["axis"], dy.ndim - 1)
    return [xp.flip(_running(xp, xp.flip(dy, axis + 1), axis + 1), axis + 1)]


CUMSUM_GRAD = Definition("CumSumGrad", same_spec, _cumsum_gradient)
CUMSUM = Definition(
    "CumSum", same_spec, _cumsum, gradient_ops((CUMSUM_GRAD, ""), None), names=("t", "dim")
)


def cumsum(t: Tensor, dim: int | None = 0) -> Tensor:
    """The sum of all elements up to and including each one, along an axis.

    float16 is added in float32.

    **Raises**: ValueError: if `t` has no such axis.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.cumsum(popxl.constant([1.0, 2.0, 3.0]))
    Tensor[cumsum_out popxl.dtypes.float32 (3,)]
    """
    axis = one_axis(t, dim or 0)
    return add_op(CUMSUM, [t, constant(axis, dtypes.int32)], {"axis": axis})[0]
