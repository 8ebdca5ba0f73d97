"""Ops that read and write at places known only when they run: gather, scatter, dynamic slices.
Each replica has its own indices; what falls on one place several times is added up in input order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ..tensor import TensorSpec
from .definition import Definition, GradientSite, add_op
from .stacked import Array, broadcast_to, narrow, normal_axes, raise_rank, unbroadcast, wide

Attributes = Mapping[str, Any]
Specs = list[TensorSpec]


def _shape_spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [TensorSpec(tuple(attributes["shape"]), inputs[0].dtype)]


def _check_integers(spec: TensorSpec, name: str = "indices") -> None:
    if not spec.dtype.is_int:
        raise TypeError(f"{name} must be integers, but they are {spec.dtype.name}")


# Gather: rows of t, that is its values at one place of an axis, in the order of the indices.
# Groups are like replicas: each has its own t and indices.


def _gather_spec(inputs: Specs, attributes: Attributes) -> Specs:
    t, indices = inputs
    _check_integers(indices)
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
    """[B, n, rest]: the replicas (and groups) first, then the axis, then all that one index has."""
    order = [i for i in range(t.ndim) if i != axis]
    order.insert(lead, axis)
    return t.transpose(order).reshape(math.prod(t.shape[:lead]), t.shape[axis], -1)


def _lead(attributes: Attributes) -> int:
    """How many axes of [R, *shape] index neither t nor rows: replicas, and groups."""
    return 1 if attributes["group_size"] == 1 else 2


def _gather(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    t, indices = inputs
    lead = _lead(attributes)
    axis = normal_axes(attributes["axis"], t.ndim - 1)[0] + 1
    rows = _rows(t, axis, lead)
    count = rows.shape[1]
    places = indices.astype(np.int64).reshape(rows.shape[0], -1)
    if indices.dtype.kind == "i" and not attributes["zero_OOR"]:
        places = xp.where(places < 0, places + count, places)
    bounded = xp.clip(places, 0, count - 1)  # what is out of range reads anything, as on an IPU
    if rows.shape[0] == 1:
        picked = rows[0][bounded[0]][None]
    else:
        picked = rows[xp.arange(rows.shape[0])[:, None], bounded]
    if attributes["zero_OOR"]:
        outside = (places != bounded)[..., None]
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


def _gather_gradient(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
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
    places = indices.astype(np.int64).reshape(batch, -1)
    rows = dy.transpose(order).reshape(batch, places.shape[1], -1)
    if indices.dtype.kind == "i" and not attributes["zero_OOR"]:
        places = xp.where(places < 0, places + count, places)
    bounded = xp.clip(places, 0, count - 1)
    if attributes["zero_OOR"]:
        rows = xp.where((places != bounded)[..., None], rows.dtype.type(0), rows)
    added = sum_rows(xp, rows, bounded, count)
    whole = added.reshape(*shape[:lead], count, *shape[lead:axis], *shape[axis + 1 :])
    return [_behind(whole, lead, 1, before)]


def sum_rows(xp: ModuleType, rows: Array, places: Array, count: int) -> Array:
    """[B, count, rest]: each row of [B, k, rest] added to its place in [B, k], in order."""
    batch, number, width = rows.shape
    flat = (places + count * xp.arange(batch)[:, None]).reshape(-1)
    values = wide(rows).reshape(batch * number, width)
    out = xp.zeros((batch * count, width), values.dtype)
    if xp is not np:
        xp.add.at(out, flat, values)
    elif flat.size:
        order = np.argsort(flat, kind="stable")
        sorted_places = flat[order]
        starts = np.flatnonzero(np.r_[True, sorted_places[1:] != sorted_places[:-1]])
        out[sorted_places[starts]] = np.add.reduceat(values[order], starts, axis=0)
    return narrow(out, rows.dtype).reshape(batch, count, width)


def _gather_family(op_type: str) -> Definition:
    grad = Definition(f"{op_type}Grad", infer=_shape_spec, run=_gather_gradient)

    def gradient(site: GradientSite) -> list[Any]:
        attributes = {**site.attributes, "shape": site.op.inputs[0].shape}
        return [add_op(grad, [site.gradient(0), site.input(1)], attributes)[0], None]

    return Definition(
        op_type, infer=_gather_spec, run=_gather, gradient=gradient, names=("t", "indices")
    )


GATHER = _gather_family("Gather")
TIED_GATHER = _gather_family("PopartTiedGather")


# Scatter: one element for each index, in the place that the index and the element's own place make


def _scatter_spec(inputs: Specs, attributes: Attributes) -> Specs:
    t, indices, values = inputs
    _check_integers(indices)
    if indices.shape != values.shape or len(t.shape) != len(values.shape):
        raise ValueError(
            f"indices and values must have one shape, of the rank of t, but the shapes are "
            f"{indices.shape}, {values.shape} and {t.shape}"
        )
    if t.dtype != values.dtype:
        raise TypeError(f"t is {t.dtype.name}, but values are {values.dtype.name}: use ops.cast")
    normal_axes(attributes["axis"], len(t.shape))
    return [TensorSpec(t.shape, t.dtype)]


def _element_places(
    xp: ModuleType, indices: Array, shape: Sequence[int], axis: int
) -> tuple[Array, ...]:
    """An index into [R, *shape] for each of indices [R, *inner]; negative ones count back."""
    out = []
    for i, n in enumerate(indices.shape):
        line = xp.arange(n).reshape(*(1,) * i, n, *(1,) * (indices.ndim - i - 1))
        out.append(line)
    places = indices.astype(np.int64)
    count = shape[axis]
    out[axis + 1] = xp.where(places < 0, places + count, places)
    return tuple(out)


def _scatter(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    t, indices, values = inputs
    (axis,) = normal_axes(attributes["axis"], t.ndim - 1)
    out = t.copy()
    out[_element_places(xp, indices, t.shape[1:], axis)] = values
    return [out]


def _scatter_data_gradient(
    xp: ModuleType, inputs: list[Array], attributes: Attributes
) -> list[Array]:
    dy, indices = inputs
    (axis,) = normal_axes(attributes["axis"], dy.ndim - 1)
    out = dy.copy()
    out[_element_places(xp, indices, dy.shape[1:], axis)] = 0
    return [out]


def _scatter_update_gradient(
    xp: ModuleType, inputs: list[Array], attributes: Attributes
) -> list[Array]:
    dy, indices = inputs
    (axis,) = normal_axes(attributes["axis"], dy.ndim - 1)
    return [dy[_element_places(xp, indices, dy.shape[1:], axis)]]


def _build_scatter_gradient(site: GradientSite) -> list[Any]:
    given = [site.gradient(0), site.input(1)]
    out: list[Any] = [None, None, None]
    for index, grad in ((0, SCATTER_DATA_GRAD), (2, SCATTER_UPDATE_GRAD)):
        if site.needs(index):
            attributes = {**site.attributes, "shape": site.op.inputs[index].shape}
            out[index] = add_op(grad, given, attributes)[0]
    return out


SCATTER_DATA_GRAD = Definition("ScatterDataGrad", infer=_shape_spec, run=_scatter_data_gradient)
SCATTER_UPDATE_GRAD = Definition(
    "ScatterUpdateGrad", infer=_shape_spec, run=_scatter_update_gradient
)
SCATTER = Definition(
    "Scatter",
    infer=_scatter_spec,
    run=_scatter,
    gradient=_build_scatter_gradient,
    names=("t", "indices", "values"),
)


# Scatter with a reduction: values of one place are added up, or the extreme of them is taken

REDUCTIONS = ("sum", "min", "max", "none")


def _scatter_reduce_spec(inputs: Specs, attributes: Attributes) -> Specs:
    data, indices = inputs[:2]
    _check_integers(indices)
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
    """The shape in which indices broadcast to data: a row of them lies along the axis."""
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


def _spread_indices(xp: ModuleType, indices: Array, data: tuple[int, ...], a: Attributes) -> Array:
    (axis,) = normal_axes(a["axis"], len(data))
    shape = _index_shape(data, indices.shape[1:], axis, a["grouped"])
    return broadcast_to(xp, indices.reshape(indices.shape[0], *shape), data)


def _least(xp: ModuleType, dtype: Any, reduction: str) -> Any:
    """What any value replaces: the start of a maximum or a minimum."""
    if np.dtype(dtype).kind == "f":
        return -np.inf if reduction == "max" else np.inf
    limits = np.iinfo(dtype)
    return limits.min if reduction == "max" else limits.max


def _scatter_reduce(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    data, indices = inputs[:2]
    (axis,) = normal_axes(attributes["axis"], data.ndim - 1)
    reduction = attributes["reduction"]
    shape = (*data.shape[1 : axis + 1], attributes["axis_size"], *data.shape[axis + 2 :])
    spread = _spread_indices(xp, indices, data.shape[1:], attributes)
    places = _element_places(xp, spread, shape, axis)
    values = wide(data)
    start = wide(inputs[2]) if len(inputs) == 3 else None
    whole = (data.shape[0], *shape)
    if reduction in ("sum", "none"):
        out = xp.zeros(whole, values.dtype) if start is None else start.copy()
        if reduction == "sum":
            xp.add.at(out, places, values)
        else:
            out[places] = values
        return [narrow(out, data.dtype)]
    fold = xp.maximum if reduction == "max" else xp.minimum
    if start is not None:
        out = start.copy()
        fold.at(out, places, values)
        return [narrow(out, data.dtype)]
    out = xp.full(whole, _least(xp, values.dtype, reduction), values.dtype)
    fold.at(out, places, values)
    reached = xp.zeros(whole, bool)
    reached[places] = True
    return [narrow(xp.where(reached, out, values.dtype.type(0)), data.dtype)]


def _scatter_reduce_data_gradient(
    xp: ModuleType, inputs: list[Array], attributes: Attributes
) -> list[Array]:
    dy, indices = inputs[:2]
    data = tuple(attributes["shape"])
    (axis,) = normal_axes(attributes["axis"], len(data))
    spread = _spread_indices(xp, indices, data, attributes)
    places = _element_places(xp, spread, dy.shape[1:], axis)
    picked = dy[places]
    if len(inputs) == 4:  # the extremes: those values that are their place's
        values, y = inputs[2:]
        picked = xp.where(values == y[places], picked, picked.dtype.type(0))
    return [picked]


def _scatter_reduce_initial_gradient(
    xp: ModuleType, inputs: list[Array], attributes: Attributes
) -> list[Array]:
    dy = inputs[0]
    reduction = attributes["reduction"]
    if reduction == "sum":
        return [dy]
    if reduction == "none":
        (axis,) = normal_axes(attributes["axis"], dy.ndim - 1)
        spread = _spread_indices(xp, inputs[1], tuple(attributes["data"]), attributes)
        out = dy.copy()
        out[_element_places(xp, spread, dy.shape[1:], axis)] = 0
        return [out]
    initial, y = inputs[1:]
    return [xp.where(initial == y, dy, dy.dtype.type(0))]


def _build_scatter_reduce_gradient(site: GradientSite) -> list[Any]:
    extreme = site.attributes["reduction"] in ("min", "max")
    data = site.op.inputs[0].shape
    out: list[Any] = [None] * len(site.op.inputs)
    if site.needs(0):
        given = [site.gradient(0), site.input(1)]
        given += [site.input(0), site.output(0)] if extreme else []
        out[0] = add_op(SCATTER_REDUCE_GRAD, given, {**site.attributes, "shape": data})[0]
    if len(out) == 3 and site.needs(2):
        given = [site.gradient(0)]
        if extreme:
            given += [site.input(2), site.output(0)]
        elif site.attributes["reduction"] == "none":
            given += [site.input(1)]
        attributes = {**site.attributes, "shape": site.op.inputs[2].shape, "data": data}
        out[2] = add_op(SCATTER_REDUCE_INITIAL_GRAD, given, attributes)[0]
    return out


SCATTER_REDUCE_GRAD = Definition(
    "ScatterReduceGrad", infer=_shape_spec, run=_scatter_reduce_data_gradient
)
SCATTER_REDUCE_INITIAL_GRAD = Definition(
    "ScatterReduceInitialGrad", infer=_shape_spec, run=_scatter_reduce_initial_gradient
)
SCATTER_REDUCE = Definition(
    "ScatterReduce",
    infer=_scatter_reduce_spec,
    run=_scatter_reduce,
    gradient=_build_scatter_reduce_gradient,
    names=("data", "indices", "initial_values"),
)


# Slices whose beginning is a tensor; beyond the end of an axis they go on at its beginning


def _check_window(t: TensorSpec, index: TensorSpec, attributes: Attributes) -> tuple[int, ...]:
    """The shape of a dynamic slice."""
    _check_integers(index, "index")
    axes, sizes = attributes["axes"], attributes["sizes"]
    if len(axes) != len(sizes) or math.prod(index.shape) != len(axes):
        raise ValueError(
            f"axes, sizes and index must have one length, but they are {list(axes)}, {list(sizes)} "
            f"and of shape {index.shape}"
        )
    shape = list(t.shape)
    for axis, size in zip(axes, sizes, strict=True):
        (axis,) = normal_axes(axis, len(shape))
        if not 0 < size <= shape[axis]:
            raise ValueError(f"A slice of {size} elements does not fit axis {axis} of {t.shape}")
        shape[axis] = size
    return tuple(shape)


def _dynamic_spec(inputs: Specs, attributes: Attributes) -> Specs:
    t, index = inputs
    return [TensorSpec(_check_window(t, index, attributes), t.dtype)]


def _dynamic_places(
    xp: ModuleType, shape: tuple[int, ...], index: Array, attributes: Attributes
) -> tuple[Any, ...]:
    """An open mesh of indices into [R, *shape]: each replica has its own beginning."""
    rank = len(shape)
    starts = index.astype(np.int64).reshape(index.shape[0], -1)
    out = [xp.arange(starts.shape[0]).reshape(-1, *(1,) * rank)]
    out += [_line(xp, n, i, rank) for i, n in enumerate(shape)]
    for number, (axis, size) in enumerate(
        zip(attributes["axes"], attributes["sizes"], strict=True)
    ):
        first = starts[:, number].reshape(-1, *(1,) * rank)
        out[axis % rank + 1] = (first + _line(xp, size, axis % rank, rank)) % shape[axis]
    return tuple(out)


def _line(xp: ModuleType, count: int, axis: int, rank: int) -> Array:
    """0 to count - 1 along one axis of [1, *shape]."""
    return xp.arange(count).reshape(1, *(1,) * axis, count, *(1,) * (rank - axis - 1))


def _dynamic_slice(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    t, index = inputs
    return [t[_dynamic_places(xp, t.shape[1:], index, attributes)]]


def _dynamic_slice_gradient(
    xp: ModuleType, inputs: list[Array], attributes: Attributes
) -> list[Array]:
    dy, index = inputs
    shape = tuple(attributes["shape"])
    out = xp.zeros((dy.shape[0], *shape), dy.dtype)
    out[_dynamic_places(xp, shape, index, attributes)] = dy
    return [out]


def _build_dynamic_slice_gradient(site: GradientSite) -> list[Any]:
    attributes = {**site.attributes, "shape": site.op.inputs[0].shape}
    return [add_op(DYNAMIC_SLICE_PAD, [site.gradient(0), site.input(1)], attributes)[0], None]


DYNAMIC_SLICE_PAD = Definition(
    "DynamicSlicePadGrad", infer=_shape_spec, run=_dynamic_slice_gradient
)
DYNAMIC_SLICE = Definition(
    "DynamicSlice",
    infer=_dynamic_spec,
    run=_dynamic_slice,
    gradient=_build_dynamic_slice_gradient,
    names=("t", "index"),
)


def _update_spec(inputs: Specs, attributes: Attributes) -> Specs:
    t, index, update = inputs
    shape = _check_window(t, index, attributes)
    try:
        fits = np.broadcast_shapes(update.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"t_update must have the shape {shape}, but it is {update.shape}")
    if update.dtype != t.dtype:
        raise TypeError(f"t is {t.dtype.name}, but t_update is {update.dtype.name}: use ops.cast")
    return [TensorSpec(t.shape, t.dtype)]


def _updating(copy: bool) -> Callable[..., list[Array]]:
    def run(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
        t, index, update = inputs
        out = t.copy() if copy else t
        places = _dynamic_places(xp, t.shape[1:], index, attributes)
        out[places] = raise_rank(update, t.ndim - 1)
        return [out]

    return run


def _update_gradient(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    return [unbroadcast(xp, _dynamic_slice(xp, inputs, attributes)[0], attributes["shape"])]


def _dynamic_zero(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    dy, index = inputs
    out = dy.copy()
    out[_dynamic_places(xp, dy.shape[1:], index, attributes)] = 0
    return [out]


def _build_update_gradient(site: GradientSite) -> list[Any]:
    given = [site.gradient(0), site.input(1)]
    out: list[Any] = [None, None, None]
    if site.needs(0):
        attributes = {**site.attributes, "shape": site.op.inputs[0].shape}
        out[0] = add_op(DYNAMIC_ZERO, given, attributes)[0]
    if site.needs(2):
        attributes = {**site.attributes, "shape": site.op.inputs[2].shape}
        out[2] = add_op(DYNAMIC_UPDATE_GRAD, given, attributes)[0]
    return out


DYNAMIC_ZERO = Definition("DynamicZeroGrad", infer=_shape_spec, run=_dynamic_zero)
DYNAMIC_UPDATE_GRAD = Definition(
    "DynamicUpdateUpdaterGrad", infer=_shape_spec, run=_update_gradient
)
DYNAMIC_UPDATE = Definition(
    "DynamicUpdate",
    infer=_update_spec,
    run=_updating(copy=True),
    gradient=_build_update_gradient,
    names=("t", "index", "t_update"),
)
DYNAMIC_UPDATE_INPLACE = Definition(
    "DynamicUpdateInplace",
    infer=_update_spec,
    run=_updating(copy=False),
    aliases={0: 0},
    modifies=(0,),
    names=("t", "index", "t_update"),
)
