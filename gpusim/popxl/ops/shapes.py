"""Ops that only rearrange elements: reshape, transpose, concat, split.

The in-place forms are views: a later change of either tensor changes the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from .._definition import (
    Array,
    Arrays,
    Attributes,
    Definition,
    GradientSite,
    Specs,
    add_op,
    gradient_ops,
    shape_spec,
)
from ..tensor import Tensor, TensorSpec
from .slicing import run_slice, slice_spec
from .utils import one_axis

__all__ = [
    "reshape_handle_negative_axis",
    "reshape",
    "reshape_",
    "flatten",
    "flatten_",
    "squeeze",
    "transpose",
    "transpose_",
    "concat",
    "concat_",
    "split",
]

# Reshapes


def _reshape_spec(inputs: Specs, attributes: Attributes) -> Specs:
    (spec,) = inputs
    shape = tuple(attributes["shape"])
    if math.prod(shape) != math.prod(spec.shape):
        raise ValueError(f"A tensor of shape {spec.shape} cannot be reshaped to {shape}")
    return [TensorSpec(shape, spec.dtype)]


def _reshape(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    (x,) = inputs
    return [x.reshape(x.shape[0], *attributes["shape"])]


def _write_reshaped(xp: Any, output: Array, inputs: Arrays, attributes: Attributes) -> None:
    inputs[0][...] = output.reshape(inputs[0].shape)


RESHAPE_GRAD = Definition("ReshapeGrad", _reshape_spec, _reshape)
RESHAPE = Definition("Reshape", _reshape_spec, _reshape, gradient_ops((RESHAPE_GRAD, "")))
RESHAPE_INPLACE = Definition(
    "ReshapeInplace",
    _reshape_spec,
    _reshape,
    gradient_ops((RESHAPE_GRAD, "")),
    aliases={0: 0},
    write_back=_write_reshaped,
)


def reshape_handle_negative_axis(t: Tensor, shape: Iterable[int]) -> tuple[int, ...]:
    """The shape with -1 replaced by the length that the other axes leave."""
    sizes = tuple(shape)
    if -1 not in sizes:
        return sizes
    rest = math.prod(size for size in sizes if size != -1)
    return tuple(t.nelms // rest if size == -1 and rest else size for size in sizes)


def _check_shape(t: Tensor, shape: Iterable[int]) -> tuple[int, ...]:
    sizes = tuple(shape)
    if any(size < -1 or (size == 0 and t.nelms) for size in sizes):
        raise ValueError(f"Invalid shape value in reshape. Must be '>0' or '-1'. Provided {sizes}.")
    if sizes.count(-1) > 1:
        raise ValueError(f"Reshape shape can contain at most one '-1' value. Provided {sizes}.")
    return reshape_handle_negative_axis(t, sizes)


def reshape(t: Tensor, shape: Iterable[int]) -> Tensor:
    """Arrange the elements of `t`, in C order, in another shape. One axis may be -1.

    **Raises**: ValueError: if the number of elements differs, or several axes are -1.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.reshape(popxl.constant([1.0, 2.0, 3.0, 4.0]), (2, -1))
    Tensor[reshape_out popxl.dtypes.float32 (2, 2)]
    """
    return add_op(RESHAPE, [t], {"shape": _check_shape(t, shape)})[0]


def reshape_(t: Tensor, shape: Iterable[int]) -> Tensor:
    """`reshape` as a view: a change of the result changes `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.reshape_(popxl.constant([1.0, 2.0, 3.0, 4.0]), (2, -1))
    Tensor[reshapeinplace_out popxl.dtypes.float32 (2, 2)]
    """
    return add_op(RESHAPE_INPLACE, [t], {"shape": _check_shape(t, shape)})[0]


def flatten(t: Tensor) -> Tensor:
    """Arrange the elements of `t`, in C order, along one axis.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.flatten(popxl.constant([[1.0, 2.0]]))
    Tensor[reshape_out popxl.dtypes.float32 (2,)]
    """
    return reshape(t, (t.nelms,))


def flatten_(t: Tensor) -> Tensor:
    """`flatten` as a view: a change of the result changes `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.flatten_(popxl.constant([[1.0, 2.0]]))
    Tensor[reshapeinplace_out popxl.dtypes.float32 (2,)]
    """
    return reshape_(t, (t.nelms,))


def squeeze(t: Tensor, axes: Iterable[int] | None = None) -> Tensor:
    """Remove axes of length 1: those in `axes`, by default all.

    **Raises**: ValueError: if an axis is longer, does not exist, or is named twice.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.squeeze(popxl.constant([[[1.0], [2.0]]]), axes=[0])
    Tensor[reshape_out popxl.dtypes.float32 (2, 1)]
    """
    shape = t.shape
    if axes is None:
        positions = [i for i, size in enumerate(shape) if size == 1]
    else:
        positions = [i if i >= 0 else i + t.rank for i in axes]
    if len(set(positions)) != len(positions):
        raise ValueError("Axes contains duplicates")
    for i in positions:
        if not 0 <= i < t.rank:
            raise ValueError(f"Can't squeeze axis '{i}' as tensor has rank '{t.rank}'")
        if shape[i] != 1:
            raise ValueError(f"Can't squeeze axis '{i}' as length of axis is >1: {shape[i]}")
    rest = tuple(size for i, size in enumerate(shape) if i not in positions)
    return add_op(RESHAPE, [t], {"shape": rest})[0]


# Transposes


def _transpose_spec(inputs: Specs, attributes: Attributes) -> Specs:
    (spec,) = inputs
    order = attributes["permutation"]
    if sorted(order) != list(range(len(spec.shape))):
        raise ValueError(
            f"{order} is not a permutation of the axes of a rank-{len(spec.shape)} tensor"
        )
    return [TensorSpec(tuple(spec.shape[i] for i in order), spec.dtype)]


def _transpose(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    return [inputs[0].transpose(0, *(i + 1 for i in attributes["permutation"]))]


def _transpose_back(site: GradientSite) -> list[Any]:
    inverse = tuple(np.argsort(site.attributes["permutation"]).tolist())
    return [add_op(TRANSPOSE_GRAD, [site.gradient(0)], {"permutation": inverse})[0]]


TRANSPOSE_GRAD = Definition("TransposeGrad", _transpose_spec, _transpose)
TRANSPOSE = Definition("Transpose", _transpose_spec, _transpose, gradient=_transpose_back)
TRANSPOSE_INPLACE = Definition(
    "TransposeInplace", _transpose_spec, _transpose, gradient=_transpose_back, aliases={0: 0}
)


def transpose(t: Tensor, permutation: Iterable[int] | None = None) -> Tensor:
    """Permute the axes of `t`; by default reverse them.

    **Raises**: ValueError: if `permutation` is not a permutation of the axes.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.transpose(popxl.constant([[1.0, 2.0, 3.0]]))
    Tensor[transpose_out popxl.dtypes.float32 (3, 1)]
    """
    return add_op(TRANSPOSE, [t], {"permutation": _order(t, permutation)})[0]


def transpose_(t: Tensor, permutation: Iterable[int] | None = None) -> Tensor:
    """`transpose` as a view: a change of the result changes `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.transpose_(popxl.constant([[1.0, 2.0, 3.0]]), (1, 0))
    Tensor[transposeinplace_out popxl.dtypes.float32 (3, 1)]
    """
    return add_op(TRANSPOSE_INPLACE, [t], {"permutation": _order(t, permutation)})[0]


def _order(t: Tensor, permutation: Iterable[int] | None) -> tuple[int, ...]:
    if permutation is None:
        return tuple(range(t.rank))[::-1]
    order = tuple(axis + t.rank if axis < 0 else axis for axis in permutation)
    beyond = tuple(axis for axis in order if axis >= t.rank)
    if beyond:
        raise ValueError(
            f"Values in permutation must be less than the tensor's rank {t.rank}. Found {beyond}"
        )
    return order


# Several tensors to one, one to several


def _cuts(counts: Sequence[int], axis: int) -> list[tuple[slice, ...]]:
    """The index, in [R, *shape], of each part along an axis."""
    ends = np.cumsum(counts).tolist()
    lead = (slice(None),) * (axis + 1)
    return [(*lead, slice(end - count, end)) for end, count in zip(ends, counts, strict=True)]


def _concat_spec(inputs: Specs, attributes: Attributes) -> Specs:
    axis = attributes["axis"]
    first = inputs[0].shape
    for spec in inputs[1:]:
        same = [n for i, n in enumerate(spec.shape) if i != axis]
        if len(spec.shape) != len(first) or same != [n for i, n in enumerate(first) if i != axis]:
            shapes = ", ".join(str(each.shape) for each in inputs)
            raise ValueError(f"The shapes {shapes} differ in more than the axis {axis}")
    count = sum(spec.shape[axis] for spec in inputs)
    return [TensorSpec((*first[:axis], count, *first[axis + 1 :]), inputs[0].dtype)]


def _concat(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    return [xp.concatenate(inputs, axis=attributes["axis"] + 1)]


def _write_concatenated(xp: Any, output: Array, inputs: Arrays, attributes: Attributes) -> None:
    axis = attributes["axis"]
    counts = [x.shape[axis + 1] for x in inputs]
    for x, positions in zip(inputs, _cuts(counts, axis), strict=True):
        x[...] = output[positions]


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


CONCAT_GRAD = Definition("ConcatGrad", slice_spec, run_slice)
CONCAT = Definition("Concat", _concat_spec, _concat, gradient=_concat_back, names=("ts_0", "ts_1"))
CONCAT_INPLACE = Definition(
    "ConcatInplace",
    _concat_spec,
    _concat,
    gradient=_concat_back,
    aliases={0: 0},
    write_back=_write_concatenated,
    names=("ts_0", "ts_1"),
)


def concat(ts: Iterable[Tensor], axis: int = 0) -> Tensor:
    """Join tensors along an axis.

    **Arguments**: `ts`: tensors of one dtype, with equal shapes except along `axis`.

    **Raises**

    - TypeError: if the dtypes differ.
    - ValueError: if the shapes differ elsewhere, there are no tensors, or no such axis.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.concat([popxl.constant([1.0, 2.0]), popxl.constant([3.0])])
    Tensor[concat_out popxl.dtypes.float32 (3,)]
    """
    return _add_concat(CONCAT, ts, axis)


def concat_(ts: Iterable[Tensor], axis: int = 0) -> Tensor:
    """Join tensors as a view: a change of the result changes them. Otherwise as `concat`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.concat_([popxl.constant([[1.0]]), popxl.constant([[3.0]])], axis=1)
    Tensor[concatinplace_out popxl.dtypes.float32 (1, 2)]
    """
    return _add_concat(CONCAT_INPLACE, ts, axis)


def _add_concat(definition: Definition, ts: Iterable[Tensor], axis: int) -> Tensor:
    tensors = list(ts)
    if not tensors:
        raise ValueError("concat needs one tensor at least")
    types_ = [t.dtype for t in tensors]
    if any(dtype is not types_[0] for dtype in types_):
        raise TypeError(f"All inputs to a concat operation must have the same type: {types_}")
    return add_op(definition, tensors, {"axis": one_axis(tensors[0], axis)})[0]


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


def _split(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    cuts = _cuts(attributes["counts"], attributes["axis"])
    return [inputs[0][positions] for positions in cuts]


def _split_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    gradients = iter(inputs)
    shape, axis = attributes["shape"], attributes["axis"]
    out = xp.zeros((inputs[0].shape[0], *shape), inputs[0].dtype)
    cuts = _cuts(attributes["counts"], axis)
    for positions, present in zip(cuts, attributes["present"], strict=True):
        if present:
            out[positions] = next(gradients)
    return [out]


def _split_back(site: GradientSite) -> list[Any]:
    gradients = [site.gradient(index) for index in range(len(site.op.outputs))]
    attributes = {
        **site.attributes,
        "shape": site.op.inputs[0].shape,
        "present": tuple(gradient is not None for gradient in gradients),
    }
    present = [gradient for gradient in gradients if gradient is not None]
    return [add_op(SPLIT_GRAD, present, attributes)[0]] if present else [None]


SPLIT_GRAD = Definition("SplitGrad", shape_spec, _split_gradient)
SPLIT = Definition("Split", _split_specs, _split, gradient=_split_back)


def split(t: Tensor, splits: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    """Cut a tensor into parts along an axis.

    **Arguments**: `splits`: the number of equal parts, or the length of each part.

    **Raises**: ValueError: if the parts do not add up to the axis, or `t` has no such axis.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     parts = popxl.ops.split(popxl.constant([1.0, 2.0, 3.0]), [1, 2])
    >>> [part.shape for part in parts]
    [(1,), (2,)]
    """
    position = one_axis(t, axis)
    if isinstance(splits, int):
        axis_len = t.shape[position]
        if splits < 1 or axis_len % splits:
            raise ValueError(
                f"Split {splits} does not equally divide tensor axis {axis} of length {axis_len}."
            )
        splits = [axis_len // splits] * splits
    names = [f"split_out_{number}" for number in range(len(splits))]
    attributes = {"counts": tuple(splits), "axis": position}
    return list(add_op(SPLIT, [t], attributes, output_names=names))
