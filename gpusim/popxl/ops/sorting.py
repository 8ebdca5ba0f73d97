"""Sorting, searching and counting: the index of an extreme, the greatest k, histograms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import ModuleType

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
    no_gradient,
    shape_spec,
)
from ..tensor import Tensor, TensorSpec
from ._stacked import flatten_axes, normal_axes, reduced_shape, wide
from .utils import one_axis

__all__ = ["argmax", "argmin", "topk", "histogram", "check_increment"]

# Indices of extremes


def _arg_spec(inputs: Specs, attributes: Attributes) -> Specs:
    (spec,) = inputs
    axes = normal_axes(attributes["axis"], len(spec.shape))
    return [TensorSpec(reduced_shape(spec.shape, axes, attributes["keepdims"]), dtypes.int32)]


def _arg(name: str) -> Callable[..., Arrays]:
    def run(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
        (x,) = inputs
        (axis,) = normal_axes(attributes["axis"], x.ndim - 1)
        indices = getattr(xp, name)(x, axis=axis + 1).astype(np.int32)
        return [xp.expand_dims(indices, axis + 1) if attributes["keepdims"] else indices]

    return run


ARG_MAX = Definition("ArgMax", _arg_spec, _arg("argmax"), gradient=no_gradient)


def argmax(t: Tensor, dim: int | None = 0, keepdim: bool | None = False) -> Tensor:
    """The index of the greatest element along an axis, as int32; the first of equal ones.

    **Arguments**

    - `dim`: the axis; a negative one counts from the end.
    - `keepdim`: whether the axis stays, with a length of 1.

    **Raises**: ValueError: if `t` has no such axis.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.argmax(popxl.constant([[1.0, 3.0], [2.0, 0.0]]), dim=1)
    Tensor[argmax_out popxl.dtypes.int32 (2,)]
    """
    attributes = {"axis": one_axis(t, dim or 0), "keepdims": bool(keepdim)}
    return add_op(ARG_MAX, [t], attributes)[0]


ARG_MIN = Definition("ArgMin", _arg_spec, _arg("argmin"), gradient=no_gradient)


def argmin(t: Tensor, dim: int | None = 0, keepdim: bool | None = False) -> Tensor:
    """The index of the least element along an axis, as int32; the first of equal ones.

    Arguments and errors as in `argmax`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.argmin(popxl.constant([[1.0, 3.0], [2.0, 0.0]]), keepdim=True)
    Tensor[argmin_out popxl.dtypes.int32 (1, 2)]
    """
    attributes = {"axis": one_axis(t, dim or 0), "keepdims": bool(keepdim)}
    return add_op(ARG_MIN, [t], attributes)[0]


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
    """The indices in descending order of values, NaNs first; of equal ones the lower first."""
    backwards = xp.argsort(row[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    return row.shape[-1] - 1 - backwards


def _topk(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    (x,) = inputs
    (axis,) = normal_axes(attributes["axis"], x.ndim - 1)
    row = xp.moveaxis(x, axis + 1, -1)
    if attributes["largest"]:
        order = _descending(xp, row)[..., : attributes["k"]]
    else:
        order = xp.argsort(row, axis=-1, kind="stable")[..., : attributes["k"]]
    if not attributes["sorted"]:
        order = xp.sort(order, axis=-1)  # any order is allowed: that of the input
    values = xp.take_along_axis(row, order, axis=-1)
    return [xp.moveaxis(values, -1, axis + 1), xp.moveaxis(order.astype(np.uint32), -1, axis + 1)]


def _topk_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    dy, indices = inputs
    out = xp.zeros((dy.shape[0], *attributes["shape"]), dy.dtype)
    (axis,) = normal_axes(attributes["axis"], out.ndim - 1)
    xp.put_along_axis(out, indices.astype(np.int64), dy, axis=axis + 1)
    return [out]


TOPK_GRAD = Definition("TopKGrad", shape_spec, _topk_gradient)
TOPK = Definition("TopK", _topk_specs, _topk, gradient_ops((TOPK_GRAD, "z")))


def topk(
    t: Tensor,
    k: int,
    axis: int,
    largest: bool,
    sorted: bool,
    available_memory_proportion: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The `k` greatest or least elements along an axis, and their indices as uint32.

    **Arguments**

    - `largest`: whether to take the greatest elements, else the least.
    - `sorted`: whether to sort them; else they keep their order in `t`.
    - `available_memory_proportion`: an option of an IPU; no effect here.

    Of equal elements the first is taken first.

    **Raises**: ValueError: if `k` is not between 1 and the length of the axis.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     values, indices = popxl.ops.topk(popxl.constant([1.0, 3.0, 2.0]), 2, 0, True, True)
    >>> values.shape, indices.dtype
    ((2,), popxl.dtypes.uint32)
    """
    attributes = {"k": k, "axis": axis, "largest": bool(largest), "sorted": bool(sorted)}
    names = ["topk_out_value", "topk_out_indices"]
    values, indices = add_op(TOPK, [t], attributes, output_names=names)
    return values, indices


# Counts per interval


def _histogram_spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [TensorSpec((len(attributes["levels"]) + 1,), dtypes.uint32)]


def _histogram(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    (x,) = inputs
    row = flatten_axes(xp, wide(x), range(x.ndim - 1))
    if attributes["absolute"]:
        row = xp.abs(row)
    levels = xp.asarray(np.asarray(attributes["levels"], row.dtype))
    # NaNs are below no level, and so in the last bin.
    below = [xp.count_nonzero(row < level, axis=-1) for level in levels]
    edges = [xp.zeros_like(below[0]), *below, xp.full_like(below[0], row.shape[-1])]
    return [xp.diff(xp.stack(edges, axis=-1), axis=-1).astype(np.uint32)]


HISTOGRAM = Definition("Histogram", _histogram_spec, _histogram)


def histogram(t: Tensor, levels: Sequence[float], absolute_of_input: bool) -> Tensor:
    """Count the elements below the first level, between levels, and from the last level on.

    **Arguments**

    - `levels`: increasing numbers. An element that equals a level counts as above it.
    - `absolute_of_input`: whether to count magnitudes.

    The counts are uint32, one more than levels.

    **Raises**: ValueError: if the levels do not increase.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.histogram(popxl.constant([0.1, -2.0, 5.0]), [1.0, 4.0], True)
    Tensor[histogram_out popxl.dtypes.uint32 (3,)]
    """
    check_increment(levels)
    attributes = {"levels": tuple(levels), "absolute": bool(absolute_of_input)}
    return add_op(HISTOGRAM, [t], attributes)[0]


def check_increment(levels: Sequence[float]) -> None:
    """Raise ValueError if levels do not increase."""
    if not all(below < above for below, above in pairwise(levels)):
        raise ValueError(f"The input levels `{levels}` is not a monotonically increasing list.")
