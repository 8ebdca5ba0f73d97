"""Ops that read and write at indices known only at run time: gather, scatter, scatter_reduce.

Each replica has its own indices. Values that fall on one position are added in input order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

import numpy as np

from ...maps.mapped_array.updates import update_at
from .._definition import (
    Array,
    Arrays,
    Attributes,
    Definition,
    GradientSite,
    Specs,
    add_op,
    gradient_ops,
    no_gradient,
    shape_spec,
)
from ..tensor import Constant, Tensor, TensorSpec
from ._stacked import broadcast_to, narrow, normal_axes, wide
from .utils import check_integers

__all__ = [
    "gather",
    "groupedgather",
    "tied_gather",
    "scatter",
    "scatter_reduce",
    "grouped_scatter_reduce",
    "onehot",
]

# Gather: the rows of t (its values at one position of an axis) in the order of the indices. Groups
# are like replicas: each has its own t and indices.


def _gather_spec(inputs: Specs, attributes: Attributes) -> Specs:
    t, indices = inputs
    check_integers(indices)
    (axis,) = normal_axes(attributes["axis"], len(t.shape))
    groups = attributes["group_size"]
    if groups == 1:
        return [TensorSpec((*t.shape[:axis], *indices.shape, *t.shape[axis + 1 :]), t.dtype)]
    if axis == 0 or {t.shape[0], *indices.shape[:1]} != {groups}:
        raise ValueError(
            f"Axis 0 of t and of indices must be that of the {groups} groups, and not the one that "
            f"is gathered on; the shapes are {t.shape} and {indices.shape}, and axis is {axis}"
        )
    return [TensorSpec((*t.shape[:axis], *indices.shape[1:], *t.shape[axis + 1 :]), t.dtype)]


def _rows(t: Array, axis: int, lead: int) -> Array:
    """[B, n, rest]: the replicas (and groups), then the axis, then the elements of one index."""
    order = [i for i in range(t.ndim) if i != axis]
    order.insert(lead, axis)
    return t.transpose(order).reshape(math.prod(t.shape[:lead]), t.shape[axis], -1)


def _lead(attributes: Attributes) -> int:
    """The number of leading axes of [R, *shape] that are batches: replicas, and groups."""
    return 1 if attributes["group_size"] == 1 else 2


def _gather(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    t, indices = inputs
    lead = _lead(attributes)
    axis = normal_axes(attributes["axis"], t.ndim - 1)[0] + 1
    rows = _rows(t, axis, lead)
    count = rows.shape[1]
    positions = indices.astype(np.int64).reshape(rows.shape[0], -1)
    if indices.dtype.kind == "i" and not attributes["zero_OOR"]:
        positions = xp.where(positions < 0, positions + count, positions)
    bounded = xp.clip(positions, 0, count - 1)  # out of range any element is read, as on an IPU
    if rows.shape[0] == 1:
        picked = rows[0][bounded[0]][None]
    else:
        picked = rows[xp.arange(rows.shape[0])[:, None], bounded]
    if attributes["zero_OOR"]:
        outside = (positions != bounded)[..., None]
        picked = xp.where(outside, picked.dtype.type(0), picked)
    before, after = t.shape[lead:axis], t.shape[axis + 1 :]
    inner = indices.shape[lead:]
    out = picked.reshape(*t.shape[:lead], *inner, *before, *after)
    return [_behind(out, lead, len(inner), len(before))]


def _behind(x: Array, start: int, count: int, before: int) -> Array:
    """The `count` axes from `start` on moved behind the `before` axes that follow them."""
    if not before or not count:
        return x
    order = [
        *range(start),
        *range(start + count, start + count + before),
        *range(start, start + count),
        *range(start + count + before, x.ndim),
    ]
    return x.transpose(order)


def _gather_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    dy, indices = inputs
    shape = (dy.shape[0], *attributes["shape"])
    lead = _lead(attributes)
    axis = normal_axes(attributes["axis"], len(shape) - 1)[0] + 1
    inner = indices.ndim - lead
    before = axis - lead
    # dy is [*lead, *before, *inner, *after]: the indices' axes in front, as rows
    order = [
        *range(lead),
        *range(axis, axis + inner),
        *range(lead, axis),
        *range(axis + inner, dy.ndim),
    ]
    batch = math.prod(shape[:lead])
    count = shape[axis]
    positions = indices.astype(np.int64).reshape(batch, -1)
    rows = dy.transpose(order).reshape(batch, positions.shape[1], -1)
    if indices.dtype.kind == "i" and not attributes["zero_OOR"]:
        positions = xp.where(positions < 0, positions + count, positions)
    bounded = xp.clip(positions, 0, count - 1)
    if attributes["zero_OOR"]:
        rows = xp.where((positions != bounded)[..., None], rows.dtype.type(0), rows)
    added = sum_rows(xp, rows, bounded, count)
    whole = added.reshape(*shape[:lead], count, *shape[lead:axis], *shape[axis + 1 :])
    return [_behind(whole, lead, 1, before)]


def sum_rows(xp: ModuleType, rows: Array, positions: Array, count: int) -> Array:
    """[B, count, rest]: each row of [B, k, rest] added to its position in [B, k], in order."""
    batch, number, width = rows.shape
    flat = (positions + count * xp.arange(batch)[:, None]).reshape(-1)
    values = wide(rows).reshape(batch * number, width)
    out = xp.zeros((batch * count, width), values.dtype)
    if xp is not np:
        update_at(np.add, out, flat, values)
    elif flat.size:
        order = np.argsort(flat, kind="stable")
        sorted_positions = flat[order]
        starts = np.flatnonzero(np.r_[True, sorted_positions[1:] != sorted_positions[:-1]])
        out[sorted_positions[starts]] = np.add.reduceat(values[order], starts, axis=0)
    return narrow(out, rows.dtype).reshape(batch, count, width)


def _gather_family(op_type: str) -> Definition:
    grad = Definition(f"{op_type}Grad", shape_spec, _gather_gradient)
    return Definition(
        op_type, _gather_spec, _gather, gradient_ops((grad, "1"), None), names=("t", "indices")
    )


GATHER = _gather_family("Gather")
TIED_GATHER = _gather_family("PopartTiedGather")


def gather(
    t: Tensor,
    indices: Tensor,
    axis: int = 0,
    available_memory_proportion: float | None = None,
    zero_OOR: bool = False,
) -> Tensor:
    """Take the values of `t` at `indices` along an axis, as numpy.take.

    **Arguments**

    - `indices`: integers of any shape; their shape replaces the axis in the result.
    - `axis`: the axis; a negative one counts from the end.
    - `available_memory_proportion`: an option of an IPU; no effect here.
    - `zero_OOR`: whether an index out of range gives zeros; else it gives any element.

    **Raises**

    - TypeError: if the indices are not integers.
    - ValueError: if `t` has no such axis.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.zeros((4, 3), np.float32))
    ...     popxl.ops.gather(t, popxl.constant([[0, 1], [3, 2]], popxl.int32))
    Tensor[gather_out popxl.dtypes.float32 (2, 2, 3)]
    """
    return _add_gather(GATHER, t, indices, axis, 1, zero_OOR)


def groupedgather(
    t: Tensor,
    indices: Tensor,
    axis: int = 0,
    group_size: int | None = 1,
    available_memory_proportion: float | None = None,
    zero_OOR: bool = False,
) -> Tensor:
    """`gather` for each group by itself: axis 0 of `t` and of `indices` is the axis of groups.

    **Arguments**: `group_size`: the number of groups; with 1 there is no axis of groups. The others
    are those of `gather`; `axis` counts the axis of groups too.

    **Raises**: as `gather`; also ValueError: if axis 0 is not the axis of groups.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.zeros((2, 4, 3), np.float32))
    ...     indices = popxl.constant([[0, 1, 1], [3, 2, 3]], popxl.int32)
    ...     popxl.ops.groupedgather(t, indices, axis=1, group_size=2)
    Tensor[gather_out popxl.dtypes.float32 (2, 3, 3)]
    """
    return _add_gather(GATHER, t, indices, axis, group_size or 1, zero_OOR)


def tied_gather(
    t: Tensor,
    indices: Tensor,
    axis: int = 0,
    available_memory_proportion: float | None = None,
    zero_OOR: bool = False,
) -> Tensor:
    """`gather` of a `t` that an IPU has laid out for a matmul. The values are those of `gather`.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.zeros((4, 3), np.float32))
    ...     popxl.ops.tied_gather(t, popxl.constant([0, 1], popxl.int32), axis=1)
    Tensor[poparttiedgather_out popxl.dtypes.float32 (4, 2)]
    """
    return _add_gather(TIED_GATHER, t, indices, axis, 1, zero_OOR)


def _add_gather(
    definition: Definition, t: Tensor, indices: Tensor, axis: int, groups: int, zero_OOR: bool
) -> Tensor:
    attributes = {"axis": axis, "group_size": groups, "zero_OOR": bool(zero_OOR)}
    return add_op(definition, [t, indices], attributes)[0]


# Scatter: one element for each index, at the index along the axis, and its own position elsewhere


def _scatter_spec(inputs: Specs, attributes: Attributes) -> Specs:
    t, indices, values = inputs
    check_integers(indices)
    if indices.shape != values.shape or len(t.shape) != len(values.shape):
        raise ValueError(
            f"indices and values must have one shape, of the rank of t, but the shapes are "
            f"{indices.shape}, {values.shape} and {t.shape}"
        )
    if t.dtype != values.dtype:
        raise TypeError(f"t is {t.dtype.name}, but values are {values.dtype.name}: use ops.cast")
    normal_axes(attributes["axis"], len(t.shape))
    return [TensorSpec(t.shape, t.dtype)]


def _element_positions(
    xp: ModuleType, indices: Array, shape: Sequence[int], axis: int
) -> tuple[Array, ...]:
    """An index into [R, *shape] for each of indices [R, *inner]; negative ones count back."""
    out = []
    for i, n in enumerate(indices.shape):
        line = xp.arange(n).reshape(*(1,) * i, n, *(1,) * (indices.ndim - i - 1))
        out.append(line)
    positions = indices.astype(np.int64)
    count = shape[axis]
    out[axis + 1] = xp.where(positions < 0, positions + count, positions)
    return tuple(out)


def _scatter(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    t, indices, values = inputs
    (axis,) = normal_axes(attributes["axis"], t.ndim - 1)
    out = t.copy()
    out[_element_positions(xp, indices, t.shape[1:], axis)] = values
    return [out]


def _scatter_data_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    dy, indices = inputs
    (axis,) = normal_axes(attributes["axis"], dy.ndim - 1)
    out = dy.copy()
    out[_element_positions(xp, indices, dy.shape[1:], axis)] = 0
    return [out]


def _scatter_update_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    dy, indices = inputs
    (axis,) = normal_axes(attributes["axis"], dy.ndim - 1)
    return [dy[_element_positions(xp, indices, dy.shape[1:], axis)]]


SCATTER_DATA_GRAD = Definition("ScatterDataGrad", shape_spec, _scatter_data_gradient)
SCATTER_UPDATE_GRAD = Definition("ScatterUpdateGrad", shape_spec, _scatter_update_gradient)
SCATTER = Definition(
    "Scatter",
    _scatter_spec,
    _scatter,
    gradient_ops((SCATTER_DATA_GRAD, "1"), None, (SCATTER_UPDATE_GRAD, "1")),
    names=("t", "indices", "values"),
)


def scatter(
    t: Tensor,
    indices: Tensor,
    values: Tensor,
    axis: int = 0,
    available_memory_proportion: float | None = None,
) -> Tensor:
    """Replace elements of `t` by `values`. The index of an element is its own, except along `axis`.

    **Arguments**

    - `indices`, `values`: of one shape, and of the rank of `t`. Of several elements with one index
      the last stays.
    - `available_memory_proportion`: an option of an IPU; no effect here.

    **Raises**

    - TypeError: if the indices are not integers, or the dtypes differ.
    - ValueError: for other shapes.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     indices = popxl.constant([2, 0], popxl.int32)
    ...     popxl.ops.scatter(popxl.constant([1.0, 2.0, 3.0]), indices, popxl.constant([5.0, 6.0]))
    Tensor[scatter_out popxl.dtypes.float32 (3,)]
    """
    return add_op(SCATTER, [t, indices, values], {"axis": axis})[0]


# Scatter with a reduction: the sum or the extreme of the values at one position

ScatterReductionType = Literal["sum", "min", "max", "none"]
REDUCTIONS = ("sum", "min", "max", "none")


def _scatter_reduce_spec(inputs: Specs, attributes: Attributes) -> Specs:
    data, indices = inputs[:2]
    check_integers(indices)
    (axis,) = normal_axes(attributes["axis"], len(data.shape))
    if attributes["grouped"] and axis == 0:
        raise ValueError("Axis 0 is that of the groups: the axis to scatter on comes after it")
    shape = (*data.shape[:axis], attributes["axis_size"], *data.shape[axis + 1 :])
    if len(inputs) == 3 and inputs[2].shape != shape:
        raise ValueError(f"initial_values must have the shape {shape}, but it is {inputs[2].shape}")
    _index_shape(data.shape, indices.shape, axis, attributes["grouped"])
    return [TensorSpec(shape, data.dtype)]


def _index_shape(
    data: tuple[int, ...], indices: tuple[int, ...], axis: int, grouped: bool
) -> tuple[int, ...]:
    """The shape in which indices broadcast to data; a vector of them lies along the axis."""
    lead = 1 if grouped else 0
    if len(indices) == lead + 1 and len(data) > lead + 1:
        indices = (
            *indices[:lead],
            *(1,) * (axis - lead),
            indices[lead],
            *(1,) * (len(data) - axis - 1),
        )
    try:
        fits = np.broadcast_shapes(indices, data) == data
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"Indices of shape {indices} do not broadcast to data of shape {data}")
    return indices


def _broadcast_indices(
    xp: ModuleType, indices: Array, data: tuple[int, ...], a: Attributes
) -> Array:
    (axis,) = normal_axes(a["axis"], len(data))
    shape = _index_shape(data, indices.shape[1:], axis, a["grouped"])
    return broadcast_to(xp, indices.reshape(indices.shape[0], *shape), data)


def _least(xp: ModuleType, dtype: Any, reduction: str) -> Any:
    """The start value of a maximum or a minimum."""
    if np.dtype(dtype).kind == "f":
        return -np.inf if reduction == "max" else np.inf
    limits = np.iinfo(dtype)
    return limits.min if reduction == "max" else limits.max


def _scatter_reduce(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    data, indices = inputs[:2]
    (axis,) = normal_axes(attributes["axis"], data.ndim - 1)
    reduction = attributes["reduction"]
    shape = (*data.shape[1 : axis + 1], attributes["axis_size"], *data.shape[axis + 2 :])
    spread = _broadcast_indices(xp, indices, data.shape[1:], attributes)
    positions = _element_positions(xp, spread, shape, axis)
    values = wide(data)
    start = wide(inputs[2]) if len(inputs) == 3 else None
    whole = (data.shape[0], *shape)
    if reduction in ("sum", "none"):
        out = xp.zeros(whole, values.dtype) if start is None else start.copy()
        if reduction == "sum":
            update_at(np.add, out, positions, values)
        else:
            out[positions] = values
        return [narrow(out, data.dtype)]
    fold = np.maximum if reduction == "max" else np.minimum
    if start is not None:
        out = start.copy()
        update_at(fold, out, positions, values)
        return [narrow(out, data.dtype)]
    out = xp.full(whole, _least(xp, values.dtype, reduction), values.dtype)
    update_at(fold, out, positions, values)
    reached = xp.zeros(whole, bool)
    reached[positions] = True
    return [narrow(xp.where(reached, out, values.dtype.type(0)), data.dtype)]


def _scatter_reduce_data_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    dy, indices = inputs[:2]
    data = tuple(attributes["shape"])
    (axis,) = normal_axes(attributes["axis"], len(data))
    spread = _broadcast_indices(xp, indices, data, attributes)
    positions = _element_positions(xp, spread, dy.shape[1:], axis)
    picked = dy[positions]
    if len(inputs) == 4:  # extremes: the values that equal their position's
        values, y = inputs[2:]
        picked = xp.where(values == y[positions], picked, picked.dtype.type(0))
    return [picked]


def _scatter_reduce_initial_gradient(
    xp: ModuleType, inputs: Arrays, attributes: Attributes
) -> Arrays:
    dy = inputs[0]
    reduction = attributes["reduction"]
    if reduction == "sum":
        return [dy]
    if reduction == "none":
        (axis,) = normal_axes(attributes["axis"], dy.ndim - 1)
        spread = _broadcast_indices(xp, inputs[1], tuple(attributes["data"]), attributes)
        out = dy.copy()
        out[_element_positions(xp, spread, dy.shape[1:], axis)] = 0
        return [out]
    initial, y = inputs[1:]
    return [xp.where(initial == y, dy, dy.dtype.type(0))]


def _build_scatter_reduce_gradient(site: GradientSite) -> list[Any]:
    extreme = site.attributes["reduction"] in ("min", "max")
    data = site.op.inputs[0].shape
    out: list[Any] = [None] * len(site.op.inputs)
    if site.needs(0):
        inputs = [site.gradient(0), site.input(1)]
        inputs += [site.input(0), site.output(0)] if extreme else []
        out[0] = add_op(SCATTER_REDUCE_GRAD, inputs, {**site.attributes, "shape": data})[0]
    if len(out) == 3 and site.needs(2):
        inputs = [site.gradient(0)]
        if extreme:
            inputs += [site.input(2), site.output(0)]
        elif site.attributes["reduction"] == "none":
            inputs += [site.input(1)]
        attributes = {**site.attributes, "shape": site.op.inputs[2].shape, "data": data}
        out[2] = add_op(SCATTER_REDUCE_INITIAL_GRAD, inputs, attributes)[0]
    return out


SCATTER_REDUCE_GRAD = Definition("ScatterReduceGrad", shape_spec, _scatter_reduce_data_gradient)
SCATTER_REDUCE_INITIAL_GRAD = Definition(
    "ScatterReduceInitialGrad", shape_spec, _scatter_reduce_initial_gradient
)
SCATTER_REDUCE = Definition(
    "ScatterReduce",
    _scatter_reduce_spec,
    _scatter_reduce,
    gradient=_build_scatter_reduce_gradient,
    names=("data", "indices", "initial_values"),
)


def scatter_reduce(
    data: Tensor,
    indices: Tensor,
    reduction: ScatterReductionType,
    initial_values: Tensor | None = None,
    axis: int = 0,
    axis_size: int | None = None,
    enable_index_broadcast: int = True,
    available_memory_proportion: float | None = None,
) -> Tensor:
    """Reduce the elements of `data` that have one index along an axis to one element.

    **Arguments**

    - `indices`: integers that broadcast to the shape of `data`; a vector of them lies along `axis`.
    - `reduction`: "sum", "min" or "max"; with "none" the last element stays.
    - `initial_values`: values that take part everywhere. Without them an index that does not occur
      gives 0.
    - `axis_size`: the length of the axis in the result, by default that of `initial_values`.
    - the others are options of an IPU; no effect here.

    **Raises**

    - TypeError: if the indices are not integers.
    - ValueError: for other shapes or another reduction, or without both `initial_values` and
      `axis_size`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     data = popxl.constant([[1.0, 2.0], [3.0, 4.0]])
    ...     indices = popxl.constant([2, 2], popxl.int32)
    ...     popxl.ops.scatter_reduce(data, indices, "sum", axis_size=3)
    Tensor[scatterreduce_out popxl.dtypes.float32 (3, 2)]
    """
    return _add_scatter_reduce(data, indices, reduction, initial_values, axis, axis_size, False)


def grouped_scatter_reduce(
    data: Tensor,
    indices: Tensor,
    reduction: ScatterReductionType,
    initial_values: Tensor | None = None,
    axis: int = 0,
    axis_size: int | None = None,
    group_size: int = 1,
    enable_index_broadcast: bool = True,
    available_memory_proportion: float | None = None,
) -> Tensor:
    """`scatter_reduce` for each group by itself: axis 0 of all tensors is the axis of groups.

    **Arguments**: `group_size`: the number of groups; with 1 there is no axis of groups. The others
    and the errors are those of `scatter_reduce`; `axis` counts the axis of groups too.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     data = popxl.constant([[1.0, 2.0], [3.0, 4.0]])
    ...     indices = popxl.constant([[0, 2], [1, 1]], popxl.int32)
    ...     popxl.ops.grouped_scatter_reduce(
    ...         data, indices, "sum", axis=1, axis_size=3, group_size=2)
    Tensor[scatterreduce_out popxl.dtypes.float32 (2, 3)]
    """
    if group_size > 1 and {data.shape[:1], indices.shape[:1]} != {(group_size,)}:
        raise ValueError(
            f"Axis 0 of data and of indices must be that of the {group_size} groups, but the "
            f"shapes are {data.shape} and {indices.shape}"
        )
    return _add_scatter_reduce(
        data, indices, reduction, initial_values, axis, axis_size, group_size > 1
    )


def _add_scatter_reduce(
    data: Tensor,
    indices: Tensor,
    reduction: str,
    initial_values: Tensor | None,
    axis: int,
    axis_size: int | None,
    grouped: bool,
) -> Tensor:
    if axis_size is None:
        if initial_values is None:
            raise ValueError("One of initial_values and axis_size must be specified")
        axis_size = initial_values.shape[axis]
    if reduction not in REDUCTIONS:
        raise ValueError(f"The reduction must be one of {list(REDUCTIONS)}")
    inputs = [data, indices] if initial_values is None else [data, indices, initial_values]
    attributes = {"axis": axis, "axis_size": axis_size, "reduction": reduction, "grouped": grouped}
    return add_op(SCATTER_REDUCE, inputs, attributes)[0]


# Classes as rows


def _one_hot_spec(inputs: Specs, attributes: Attributes) -> Specs:
    indices, _, values = inputs
    axis, count = attributes["axis"], attributes["num_classes"]
    rank = len(indices.shape) + 1
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} is out of range for an output of rank {rank}")
    if values.shape != (2,):
        raise ValueError(f"values must have the shape (2,): off and on; it has {values.shape}")
    shape = list(indices.shape)
    shape.insert(axis % rank, count)
    return [TensorSpec(tuple(shape), values.dtype)]


def _one_hot(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    indices, _, values = inputs
    rank = indices.ndim
    axis = attributes["axis"] % rank + 1
    count = attributes["num_classes"]
    classes = xp.arange(count).reshape(count, *(1,) * (rank - axis))
    chosen = xp.expand_dims(indices.astype(np.int64) % count, axis)
    off, on = (values[:, i].reshape(-1, *(1,) * rank) for i in (0, 1))
    return [xp.where(chosen == classes, on, off)]


ONE_HOT = Definition(
    "OneHot", _one_hot_spec, _one_hot, gradient=no_gradient, names=("t", "num_classes", "values")
)


def onehot(t: Tensor, num_classes: Tensor, values: Tensor, axis: int) -> Tensor:
    """Each class of `t` as a row along a new axis: one value at its position, another elsewhere.

    **Arguments**

    - `t`: integers; negative classes count from the last.
    - `num_classes`: the length of the new axis, a constant.
    - `values`: (2,): the value elsewhere and the value of the class, as in ONNX's OneHot.
    - `axis`: the position of the new axis; -1 is behind all others.

    **Raises**

    - TypeError: if `num_classes` is not a constant.
    - ValueError: for other shapes.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     classes = popxl.constant(3, popxl.int32)
    ...     values = popxl.constant([0.0, 1.0])
    ...     popxl.ops.onehot(popxl.constant([0, 2], popxl.int32), classes, values, axis=-1)
    Tensor[onehot_out popxl.dtypes.float32 (2, 3)]
    """
    if not isinstance(num_classes, Constant) or math.prod(num_classes.shape) != 1:
        raise TypeError(
            f"num_classes decides a shape, so it must be a constant of one element, not "
            f"{num_classes}"
        )
    attributes = {"axis": axis, "num_classes": int(num_classes._data.item())}
    return add_op(ONE_HOT, [t, num_classes, values], attributes)[0]
