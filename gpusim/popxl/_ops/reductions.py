"""Ops that make one value of many: sums, norms, extremes, orders, histograms, and running sums.
All of them reduce one trailing axis of an array [R, *kept, n], and add float16 in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from .. import dtypes
from ..tensor import TensorSpec
from .definition import Definition, GradientSite, add_op
from .stacked import (
    Array,
    add_up,
    flattened,
    narrow,
    normal_axes,
    reduced_shape,
    wide,
)

Attributes = Mapping[str, Any]
Specs = list[TensorSpec]


def _axes(spec: TensorSpec, attributes: Attributes) -> tuple[int, ...]:
    return normal_axes(attributes["axes"], len(spec.shape))


def _reduced_spec(inputs: Specs, attributes: Attributes) -> Specs:
    (spec,) = inputs
    axes = _axes(spec, attributes)
    return [TensorSpec(reduced_shape(spec.shape, axes, attributes["keepdims"]), spec.dtype)]


def _along(x: Array, attributes: Attributes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of a reduction, and the shape [R, *...] of its result with all axes kept."""
    axes = normal_axes(attributes["axes"], x.ndim - 1)
    return axes, (x.shape[0], *reduced_shape(x.shape[1:], axes, True))


Fold = Callable[[ModuleType, Array], Array]
Share = Callable[[ModuleType, Array, Array, Array], Array]


def _first_spec(inputs: Specs, attributes: Attributes) -> Specs:
    """The spec of a reduction's gradient: that of the forward input, which is the second."""
    return [TensorSpec(inputs[1].shape, inputs[1].dtype)]


def _shape_spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [TensorSpec(tuple(attributes["shape"]), inputs[0].dtype)]


def _folding(fold: Fold) -> Callable[..., list[Array]]:
    def run(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
        (x,) = inputs
        axes, _ = _along(x, attributes)
        folded = narrow(fold(xp, flattened(xp, wide(x), axes)), x.dtype)
        shape = reduced_shape(x.shape[1:], axes, attributes["keepdims"])
        return [folded.reshape(x.shape[0], *shape)]

    return run


def _reduction(op_type: str, fold: Fold, share: Share | None = None) -> Definition:
    """A reduction, with the gradient as a function of dy, x and y, all in shapes that broadcast."""
    if share is None:
        return Definition(op_type, infer=_reduced_spec, run=_folding(fold))

    def run_gradient(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
        dy, x, y = inputs
        _, kept = _along(x, attributes)
        gradient = share(xp, wide(dy).reshape(kept), wide(x), wide(y).reshape(kept))
        return [narrow(gradient, x.dtype)]

    grad = Definition(f"{op_type}Grad", infer=_first_spec, run=run_gradient)

    def gradient(site: GradientSite) -> list[Any]:
        given = [site.gradient(0), site.input(0), site.output(0)]
        return [add_op(grad, given, site.attributes)[0]]

    return Definition(op_type, infer=_reduced_spec, run=_folding(fold), gradient=gradient)


def _spread(op_type: str, fold: Fold, mean: bool) -> Definition:
    """A sum or mean: its gradient is the output's, repeated, and needs no other value."""

    def run_gradient(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
        (dy,) = inputs
        shape = tuple(attributes["shape"])
        axes = normal_axes(attributes["axes"], len(shape))
        if mean:
            dy = narrow(wide(dy) / math.prod(shape[i] for i in axes), dy.dtype)
        kept = dy.reshape(dy.shape[0], *reduced_shape(shape, axes, True))
        return [xp.broadcast_to(kept, (dy.shape[0], *shape))]

    grad = Definition(f"{op_type}Grad", infer=_shape_spec, run=run_gradient)

    def gradient(site: GradientSite) -> list[Any]:
        attributes = {"axes": site.attributes["axes"], "shape": site.op.inputs[0].shape}
        return [add_op(grad, [site.gradient(0)], attributes)[0]]

    return Definition(op_type, infer=_reduced_spec, run=_folding(fold), gradient=gradient)


def _mean(xp: ModuleType, x: Array) -> Array:
    if x.dtype.kind == "f":
        return add_up(xp, x) / x.shape[-1]
    summed = x.sum(axis=-1, dtype=np.int64)
    return (summed - xp.fmod(summed, x.shape[-1])) // x.shape[-1]  # rounded to zero


def _log_sum_exp(xp: ModuleType, x: Array) -> Array:
    highest = x.max(axis=-1, keepdims=True)
    finite = xp.where(xp.isfinite(highest), highest, 0)
    return xp.log(add_up(xp, xp.exp(x - finite))) + finite[..., 0]


def _product_of_others(xp: ModuleType, x: Array) -> Array:
    """The product of all other elements along the last axis, zeros or not."""
    before = xp.cumprod(x, axis=-1)
    after = xp.cumprod(x[..., ::-1], axis=-1)[..., ::-1]
    out = xp.ones_like(x)
    out[..., 1:] = before[..., :-1]
    out[..., :-1] *= after[..., 1:]
    return out


def _product_gradient(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    dy, x = inputs
    axes, kept = _along(x, attributes)
    rank = x.ndim - 1
    order = [0, *(i + 1 for i in range(rank) if i not in axes), *(i + 1 for i in axes)]
    others = _product_of_others(xp, flattened(xp, wide(x), axes))
    others = others.reshape([x.shape[i] for i in order]).transpose(np.argsort(order).tolist())
    return [narrow(wide(dy).reshape(kept) * others, x.dtype)]


def _build_product_gradient(site: GradientSite) -> list[Any]:
    return [add_op(PROD_GRAD, [site.gradient(0), site.input(0)], site.attributes)[0]]


# As PopART: of several elements that are the extreme, each gets the whole gradient.
def _to_extremes(xp: ModuleType, dy: Array, x: Array, y: Array) -> Array:
    return xp.where(x == y, dy, xp.zeros_like(dy))


REDUCE_SUM = _spread("ReduceSum", add_up, mean=False)
REDUCE_MEAN = _spread("ReduceMean", _mean, mean=True)
REDUCE_MAX = _reduction("ReduceMax", lambda xp, x: x.max(axis=-1), _to_extremes)
REDUCE_MIN = _reduction("ReduceMin", lambda xp, x: x.min(axis=-1), _to_extremes)
REDUCE_L1 = _reduction(
    "ReduceL1", lambda xp, x: add_up(xp, xp.abs(x)), lambda xp, dy, x, y: dy * xp.sign(x)
)
REDUCE_L2 = _reduction(
    "ReduceL2", lambda xp, x: xp.sqrt(add_up(xp, x * x)), lambda xp, dy, x, y: dy * x / y
)
REDUCE_LOG_SUM = _reduction(
    "ReduceLogSum",
    lambda xp, x: xp.log(add_up(xp, x)),
    lambda xp, dy, x, y: xp.broadcast_to(dy / xp.exp(y), x.shape),
)
REDUCE_LOG_SUM_EXP = _reduction(
    "ReduceLogSumExp", _log_sum_exp, lambda xp, dy, x, y: dy * xp.exp(x - y)
)
REDUCE_SUM_SQUARE = _reduction(
    "ReduceSumSquare", lambda xp, x: add_up(xp, x * x), lambda xp, dy, x, y: dy * (x + x)
)
PROD_GRAD = Definition("ReduceProdGrad", infer=_first_spec, run=_product_gradient)
REDUCE_PROD = Definition(
    "ReduceProd",
    infer=_reduced_spec,
    run=_folding(lambda xp, x: x.prod(axis=-1, dtype=x.dtype)),
    gradient=_build_product_gradient,
)


# Medians: the lower of the two middle elements where there are two, and its index


def _median_specs(inputs: Specs, attributes: Attributes) -> Specs:
    (values,) = _reduced_spec(inputs, attributes)
    return [values, TensorSpec(values.shape, dtypes.int32)]


def _median(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    (x,) = inputs
    axes, _ = _along(x, attributes)
    row = flattened(xp, x, axes)
    order = xp.argsort(row, axis=-1, kind="stable")
    middle = order[..., (row.shape[-1] - 1) // 2]
    values = xp.take_along_axis(row, middle[..., None], axis=-1)
    shape = (x.shape[0], *reduced_shape(x.shape[1:], axes, attributes["keepdims"]))
    return [values.reshape(shape), middle.astype(np.int32).reshape(shape)]


def _median_gradient(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    dy, indices = inputs
    shape = tuple(attributes["shape"])
    axes = normal_axes(attributes["axes"], len(shape))
    kept = reduced_shape(shape, axes, False)
    count = math.prod(shape[i] for i in axes)
    replicas = dy.shape[0]
    places = indices.reshape(replicas, *kept)[..., None] == xp.arange(count, dtype=np.int32)
    rows = xp.where(places, dy.reshape(replicas, *kept)[..., None], xp.zeros((), dy.dtype))
    order = [i for i in range(len(shape)) if i not in axes] + list(axes)
    back = np.argsort(order).tolist()
    moved = rows.reshape(replicas, *(shape[i] for i in order))
    return [moved.transpose(0, *(i + 1 for i in back))]


def _build_median_gradient(site: GradientSite) -> list[Any]:
    dy = site.gradient(0)
    if dy is None:
        return [None]
    attributes = {"axes": site.attributes["axes"], "shape": site.op.inputs[0].shape}
    return [add_op(MEDIAN_GRAD, [dy, site.output(1)], attributes)[0]]


MEDIAN_GRAD = Definition("ReduceMedianGrad", infer=_shape_spec, run=_median_gradient)
REDUCE_MEDIAN = Definition(
    "ReduceMedian", infer=_median_specs, run=_median, gradient=_build_median_gradient
)


# Indices of extremes


def _arg_spec(inputs: Specs, attributes: Attributes) -> Specs:
    (spec,) = inputs
    axes = normal_axes(attributes["axis"], len(spec.shape))
    return [TensorSpec(reduced_shape(spec.shape, axes, attributes["keepdims"]), dtypes.int32)]


def _arg(name: str) -> Callable[..., list[Array]]:
    def run(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
        (x,) = inputs
        (axis,) = normal_axes(attributes["axis"], x.ndim - 1)
        found = getattr(xp, name)(x, axis=axis + 1).astype(np.int32)
        return [xp.expand_dims(found, axis + 1) if attributes["keepdims"] else found]

    return run


ARG_MAX = Definition(
    "ArgMax", infer=_arg_spec, run=_arg("argmax"), gradient=lambda site: [None], names=("t",)
)
ARG_MIN = Definition(
    "ArgMin", infer=_arg_spec, run=_arg("argmin"), gradient=lambda site: [None], names=("t",)
)


# The k largest or smallest


def _topk_specs(inputs: Specs, attributes: Attributes) -> Specs:
    (spec,) = inputs
    (axis,) = normal_axes(attributes["axis"], len(spec.shape))
    k = attributes["k"]
    if not 0 < k <= spec.shape[axis]:
        raise ValueError(f"k must be 1 to {spec.shape[axis]}, the axis's length, but it is {k}")
    shape = (*spec.shape[:axis], k, *spec.shape[axis + 1 :])
    return [TensorSpec(shape, spec.dtype), TensorSpec(shape, dtypes.uint32)]


def _descending(xp: ModuleType, row: Array) -> Array:
    """The order of falling values, NaNs first; of equal ones the lower index is first."""
    backwards = xp.argsort(row[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    return row.shape[-1] - 1 - backwards


def _topk(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    (x,) = inputs
    (axis,) = normal_axes(attributes["axis"], x.ndim - 1)
    row = xp.moveaxis(x, axis + 1, -1)
    if attributes["largest"]:
        order = _descending(xp, row)[..., : attributes["k"]]
    else:
        order = xp.argsort(row, axis=-1, kind="stable")[..., : attributes["k"]]
    if not attributes["sorted"]:
        order = xp.sort(order, axis=-1)  # any order will do: that of the input
    values = xp.take_along_axis(row, order, axis=-1)
    return [
        xp.moveaxis(values, -1, axis + 1),
        xp.moveaxis(order.astype(np.uint32), -1, axis + 1),
    ]


def _topk_gradient(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    dy, indices = inputs
    out = xp.zeros((dy.shape[0], *attributes["shape"]), dy.dtype)
    xp.put_along_axis(out, indices.astype(np.int64), dy, axis=attributes["axis"] + 1)
    return [out]


def _build_topk_gradient(site: GradientSite) -> list[Any]:
    dy = site.gradient(0)
    if dy is None:
        return [None]
    shape = site.op.inputs[0].shape
    attributes = {"axis": site.attributes["axis"] % len(shape), "shape": shape}
    return [add_op(TOPK_GRAD, [dy, site.output(1)], attributes)[0]]


TOPK_GRAD = Definition("TopKGrad", infer=_shape_spec, run=_topk_gradient)
TOPK = Definition("TopK", infer=_topk_specs, run=_topk, gradient=_build_topk_gradient, names=("t",))


# Running sums


def _same_spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [TensorSpec(inputs[0].shape, inputs[0].dtype)]


def _running(xp: ModuleType, x: Array, axis: int) -> Array:
    return narrow(xp.cumsum(wide(x), axis=axis, dtype=wide(x[:0]).dtype), x.dtype)


def _cumsum(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    x = inputs[0]  # the axis, which PopART has as a second input, is an attribute too
    (axis,) = normal_axes(attributes["axis"], x.ndim - 1)
    return [_running(xp, x, axis + 1)]


def _cumsum_gradient(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    (dy,) = inputs
    (axis,) = normal_axes(attributes["axis"], dy.ndim - 1)
    return [xp.flip(_running(xp, xp.flip(dy, axis + 1), axis + 1), axis + 1)]


CUMSUM_GRAD = Definition("CumSumGrad", infer=_same_spec, run=_cumsum_gradient)
CUMSUM = Definition(
    "CumSum",
    infer=_same_spec,
    run=_cumsum,
    gradient=lambda site: [add_op(CUMSUM_GRAD, [site.gradient(0)], site.attributes)[0], None],
    names=("t", "dim"),
)


# The sum of squares that LAMB takes the root of, and counts per interval


def _scalar_spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [TensorSpec((), dtypes.float32)]


def _lamb_square(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    (x,) = inputs
    row = flattened(xp, x, range(x.ndim - 1)).astype(np.float32)
    return [add_up(xp, row * row)]


LAMB_SQUARE = Definition("LambSquare", infer=_scalar_spec, run=_lamb_square, names=("t",))


def _histogram_spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [TensorSpec((len(attributes["levels"]) + 1,), dtypes.uint32)]


def _histogram(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    (x,) = inputs
    row = flattened(xp, wide(x), range(x.ndim - 1))
    if attributes["absolute"]:
        row = xp.abs(row)
    levels = xp.asarray(np.asarray(attributes["levels"], row.dtype))
    # Counts of elements from each level on; NaNs are below none of them, and so in the last bin.
    below = [xp.count_nonzero(row < level, axis=-1) for level in levels]
    edges = [xp.zeros_like(below[0]), *below, xp.full_like(below[0], row.shape[-1])]
    return [xp.diff(xp.stack(edges, axis=-1), axis=-1).astype(np.uint32)]


HISTOGRAM = Definition("Histogram", infer=_histogram_spec, run=_histogram, names=("t",))
