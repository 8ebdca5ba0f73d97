"""Ops that arrange elements anew and compute nothing: reshape, transpose, slice, concat, split.
The in-place forms are views: a later change of the one is seen through the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from ..tensor import TensorSpec
from .definition import Definition, GradientSite, add_op
from .stacked import Array

Attributes = Mapping[str, Any]
Specs = list[TensorSpec]
Shape = tuple[int, ...]


def same_spec(inputs: Specs, attributes: Attributes) -> Specs:
    """The spec of the first input."""
    return [TensorSpec(inputs[0].shape, inputs[0].dtype)]


def _shape_spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [TensorSpec(tuple(attributes["shape"]), inputs[0].dtype)]


# Reshapes


def _reshape_spec(inputs: Specs, attributes: Attributes) -> Specs:
    (spec,) = inputs
    shape = tuple(attributes["shape"])
    if math.prod(shape) != math.prod(spec.shape):
        raise ValueError(f"A tensor of shape {spec.shape} cannot be reshaped to {shape}")
    return [TensorSpec(shape, spec.dtype)]


def _reshape(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    (x,) = inputs
    return [x.reshape(x.shape[0], *attributes["shape"])]


def _write_reshaped(xp: Any, output: Array, inputs: list[Array], attributes: Attributes) -> None:
    inputs[0][...] = output.reshape(inputs[0].shape)


def _reshape_back(site: GradientSite) -> list[Any]:
    attributes = {"shape": site.op.inputs[0].shape}
    return [add_op(RESHAPE_GRAD, [site.gradient(0)], attributes)[0]]


RESHAPE_GRAD = Definition("ReshapeGrad", infer=_reshape_spec, run=_reshape)
RESHAPE = Definition(
    "Reshape", infer=_reshape_spec, run=_reshape, gradient=_reshape_back, names=("t",)
)
RESHAPE_INPLACE = Definition(
    "ReshapeInplace",
    infer=_reshape_spec,
    run=_reshape,
    gradient=_reshape_back,
    aliases={0: 0},
    write_back=_write_reshaped,
    names=("t",),
)


# Transposes


def _transpose_spec(inputs: Specs, attributes: Attributes) -> Specs:
    (spec,) = inputs
    order = attributes["permutation"]
    if sorted(order) != list(range(len(spec.shape))):
        raise ValueError(
            f"{order} is no permutation of the axes of a rank-{len(spec.shape)} tensor"
        )
    return [TensorSpec(tuple(spec.shape[i] for i in order), spec.dtype)]


def _transpose(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    return [inputs[0].transpose(0, *(i + 1 for i in attributes["permutation"]))]


def _transpose_back(site: GradientSite) -> list[Any]:
    inverse = tuple(np.argsort(site.attributes["permutation"]).tolist())
    return [add_op(TRANSPOSE_GRAD, [site.gradient(0)], {"permutation": inverse})[0]]


TRANSPOSE_GRAD = Definition("TransposeGrad", infer=_transpose_spec, run=_transpose)
TRANSPOSE = Definition(
    "Transpose", infer=_transpose_spec, run=_transpose, gradient=_transpose_back, names=("t",)
)
TRANSPOSE_INPLACE = Definition(
    "TransposeInplace",
    infer=_transpose_spec,
    run=_transpose,
    gradient=_transpose_back,
    aliases={0: 0},
    names=("t",),
)


# Slices


@lru_cache(maxsize=4096)
def _cut(
    shape: Shape,
    starts: tuple[int, ...],
    stops: tuple[int, ...],
    steps: tuple[int, ...],
    axes: tuple[int, ...],
) -> tuple[slice, ...]:
    """The index of a slice in [R, *shape].

    Positions are as in ONNX: negative ones count from the end and what leaves the axis is cut off.
    """
    out = [slice(None)] * (len(shape) + 1)
    for start, stop, step, axis in zip(starts, stops, steps, axes, strict=True):
        if step == 0:
            raise ValueError("A slice's step must not be 0")
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"axis {axis} is out of range for a tensor of rank {len(shape)}")
        first, end, by = slice(start, stop, step).indices(shape[axis])
        out[axis % len(shape) + 1] = slice(first, end if end >= 0 else None, by)
    return tuple(out)


def _places(shape: Shape, attributes: Attributes) -> tuple[slice, ...]:
    return _cut(shape, *(attributes[name] for name in ("starts", "stops", "steps", "axes")))


def _slice_spec(inputs: Specs, attributes: Attributes) -> Specs:
    (spec,) = inputs
    places = _places(spec.shape, attributes)[1:]
    shape = (len(range(n)[place]) for n, place in zip(spec.shape, places, strict=True))
    return [TensorSpec(shape, spec.dtype)]


def _slice(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    (x,) = inputs
    return [x[_places(x.shape[1:], attributes)]]


def _slice_gradient(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    (dy,) = inputs
    out = xp.zeros((dy.shape[0], *attributes["shape"]), dy.dtype)
    out[_places(attributes["shape"], attributes)] = dy
    return [out]


def _slice_back(site: GradientSite) -> list[Any]:
    attributes = {**site.attributes, "shape": site.op.inputs[0].shape}
    return [add_op(SLICE_GRAD, [site.gradient(0)], attributes)[0]]


SLICE_GRAD = Definition("SliceGrad", infer=_shape_spec, run=_slice_gradient)
SLICE = Definition("Slice", infer=_slice_spec, run=_slice, gradient=_slice_back, names=("t",))
SLICE_INPLACE = Definition(
    "SliceInplace",
    infer=_slice_spec,
    run=_slice,
    gradient=_slice_back,
    aliases={0: 0},
    names=("t",),
)
SUBSAMPLE = Definition(
    "Subsample", infer=_slice_spec, run=_slice, gradient=_slice_back, names=("t",)
)


# Several tensors in one, one in several


def _concat_spec(inputs: Specs, attributes: Attributes) -> Specs:
    axis = attributes["axis"]
    first = inputs[0].shape
    for spec in inputs[1:]:
        same = [n for i, n in enumerate(spec.shape) if i != axis]
        if len(spec.shape) != len(first) or same != [n for i, n in enumerate(first) if i != axis]:
            shapes = ", ".join(str(given.shape) for given in inputs)
            raise ValueError(f"The shapes {shapes} differ in more than the axis {axis}")
    count = sum(spec.shape[axis] for spec in inputs)
    return [TensorSpec((*first[:axis], count, *first[axis + 1 :]), inputs[0].dtype)]


def _concat(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    return [xp.concatenate(inputs, axis=attributes["axis"] + 1)]


def _cuts(counts: Sequence[int], axis: int) -> list[tuple[slice, ...]]:
    """The index, in [R, *shape], of each part along an axis."""
    ends = np.cumsum(counts).tolist()
    lead = (slice(None),) * (axis + 1)
    return [(*lead, slice(end - count, end)) for end, count in zip(ends, counts, strict=True)]


def _write_concatenated(
    xp: Any, output: Array, inputs: list[Array], attributes: Attributes
) -> None:
    axis = attributes["axis"]
    counts = [x.shape[axis + 1] for x in inputs]
    for x, places in zip(inputs, _cuts(counts, axis), strict=True):
        x[...] = output[places]


def _concat_back(site: GradientSite) -> list[Any]:
    axis = site.attributes["axis"]
    ends = np.cumsum([tensor.shape[axis] for tensor in site.op.inputs]).tolist()
    out: list[Any] = []
    for index, (tensor, end) in enumerate(zip(site.op.inputs, ends, strict=True)):
        if not site.needs(index):
            out.append(None)
            continue
        start = end - tensor.shape[axis]
        attributes = {"starts": (start,), "stops": (end,), "steps": (1,), "axes": (axis,)}
        out += add_op(CONCAT_GRAD, [site.gradient(0)], attributes)
    return out


CONCAT_GRAD = Definition("ConcatGrad", infer=_slice_spec, run=_slice)
CONCAT = Definition(
    "Concat", infer=_concat_spec, run=_concat, gradient=_concat_back, names=("ts_0", "ts_1")
)
CONCAT_INPLACE = Definition(
    "ConcatInplace",
    infer=_concat_spec,
    run=_concat,
    gradient=_concat_back,
    aliases={0: 0},
    write_back=_write_concatenated,
    names=("ts_0", "ts_1"),
)


def _split_specs(inputs: Specs, attributes: Attributes) -> Specs:
    (spec,) = inputs
    axis, counts = attributes["axis"], attributes["counts"]
    if sum(counts) != spec.shape[axis]:
        raise ValueError(
            f"The splits {list(counts)} do not add up to {spec.shape[axis]}, the length of axis "
            f"{axis}"
        )
    before, after = spec.shape[:axis], spec.shape[axis + 1 :]
    return [TensorSpec((*before, count, *after), spec.dtype) for count in counts]


def _split(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    cuts = _cuts(attributes["counts"], attributes["axis"])
    return [inputs[0][places] for places in cuts]


def _split_gradient(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    given = iter(inputs)
    shape, axis = attributes["shape"], attributes["axis"]
    out = xp.zeros((inputs[0].shape[0], *shape), inputs[0].dtype)
    cuts = _cuts(attributes["counts"], axis)
    for places, present in zip(cuts, attributes["present"], strict=True):
        if present:
            out[places] = next(given)
    return [out]


def _split_back(site: GradientSite) -> list[Any]:
    found = [site.gradient(index) for index in range(len(site.op.outputs))]
    attributes = {
        **site.attributes,
        "shape": site.op.inputs[0].shape,
        "present": tuple(gradient is not None for gradient in found),
    }
    present = [gradient for gradient in found if gradient is not None]
    return [add_op(SPLIT_GRAD, present, attributes)[0]] if present else [None]


SPLIT_GRAD = Definition("SplitGrad", infer=_shape_spec, run=_split_gradient)
SPLIT = Definition("Split", infer=_split_specs, run=_split, gradient=_split_back, names=("t",))


# What only moves a value, or stops its gradient


def _pass(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    return [inputs[0]]


def _pass_gradient(site: GradientSite) -> list[Any]:
    return [add_op(IDENTITY_GRAD, [site.gradient(0)])[0]]


IDENTITY_GRAD = Definition("IdentityGrad", infer=same_spec, run=_pass)
IDENTITY = Definition("Identity", infer=same_spec, run=_pass, gradient=_pass_gradient, names=("t",))
DETACH = Definition(
    "Detach", infer=same_spec, run=_pass, gradient=lambda site: [None], names=("t",)
)
DETACH_INPLACE = Definition(
    "DetachInplace",
    infer=same_spec,
    run=_pass,
    gradient=lambda site: [None],
    aliases={0: 0},
    names=("t",),
)


def _ipu_copy_back(site: GradientSite) -> list[Any]:
    attributes = {
        "source": site.attributes["destination"],
        "destination": site.attributes["source"],
    }
    source = attributes["destination"]
    return [add_op(IPU_COPY, [site.gradient(0)], attributes, ipu=source)[0]]


IPU_COPY = Definition("IpuCopy", infer=same_spec, run=_pass, gradient=_ipu_copy_back, names=("t",))


def _tile_copy_back(site: GradientSite) -> list[Any]:
    to = "io" if site.op.tile_set == "compute" else "compute"
    return [add_op(IO_TILE_COPY, [site.gradient(0)], tile_set=to)[0]]


IO_TILE_COPY = Definition(
    "IoTileCopy", infer=same_spec, run=_pass, gradient=_tile_copy_back, names=("t",)
)


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


def _one_hot(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    indices, _, values = inputs
    rank = indices.ndim
    axis = attributes["axis"] % rank + 1
    count = attributes["num_classes"]
    classes = xp.arange(count).reshape(count, *(1,) * (rank - axis))
    chosen = xp.expand_dims(indices.astype(np.int64) % count, axis)
    off, on = (values[:, i].reshape(-1, *(1,) * rank) for i in (0, 1))
    return [xp.where(chosen == classes, on, off)]


ONE_HOT = Definition(
    "OneHot",
    infer=_one_hot_spec,
    run=_one_hot,
    gradient=lambda site: [None, None, None],
    names=("t", "num_classes", "values"),
)
