"""Slices with constant bounds, as copies and views; and slices that begin where a tensor says."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

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
from ..tensor import Tensor, TensorSpec
from ._stacked import Shape, normal_axes, raise_rank, unbroadcast
from .utils import check_integers

__all__ = [
    "slice",
    "slice_",
    "process_args",
    "subsample",
    "dynamic_slice",
    "dynamic_update",
    "dynamic_update_",
]


@lru_cache(maxsize=4096)
def _cut(
    shape: Shape,
    starts: tuple[int, ...],
    stops: tuple[int, ...],
    steps: tuple[int, ...],
    axes: tuple[int, ...],
) -> tuple[builtins.slice, ...]:
    """The index of a slice in [R, *shape].

    Bounds are as in ONNX: negative ones count from the end, and the rest is limited to the axis.
    """
    out = [builtins.slice(None)] * (len(shape) + 1)
    for start, stop, step, axis in zip(starts, stops, steps, axes, strict=True):
        if step == 0:
            raise ValueError("A slice's step must not be 0")
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"axis {axis} is out of range for a tensor of rank {len(shape)}")
        first, end, by = builtins.slice(start, stop, step).indices(shape[axis])
        out[axis % len(shape) + 1] = builtins.slice(first, end if end >= 0 else None, by)
    return tuple(out)


def _positions(shape: Shape, attributes: Attributes) -> tuple[builtins.slice, ...]:
    return _cut(shape, *(attributes[name] for name in ("starts", "stops", "steps", "axes")))


def slice_spec(inputs: Specs, attributes: Attributes) -> Specs:
    (spec,) = inputs
    positions = _positions(spec.shape, attributes)[1:]
    shape = (len(range(n)[position]) for n, position in zip(spec.shape, positions, strict=True))
    return [TensorSpec(shape, spec.dtype)]


def run_slice(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    (x,) = inputs
    return [x[_positions(x.shape[1:], attributes)]]


def _slice_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    (dy,) = inputs
    out = xp.zeros((dy.shape[0], *attributes["shape"]), dy.dtype)
    out[_positions(attributes["shape"], attributes)] = dy
    return [out]


SLICE_GRAD = Definition("SliceGrad", shape_spec, _slice_gradient)
SLICE = Definition("Slice", slice_spec, run_slice, gradient_ops((SLICE_GRAD, "")))
SLICE_INPLACE = Definition(
    "SliceInplace", slice_spec, run_slice, gradient_ops((SLICE_GRAD, "")), aliases={0: 0}
)
SUBSAMPLE = Definition("Subsample", slice_spec, run_slice, gradient_ops((SLICE_GRAD, "")))
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
Bounds = int | Sequence[int | None] | None


def slice(
    t: Tensor,
    start: Bounds = None,
    stop: Bounds = None,
    step: Bounds = None,
    axis: int | Sequence[int] | None = None,
) -> Tensor:
    """The elements of `t` from `start` up to, and without, `stop`, along axes.

    **Arguments**

    - `start`, `stop`: a number for each axis; a negative one counts from the end. None is the
      beginning and the end of the axis, exchanged if the step is negative.
    - `step`: a number for each axis, by default 1; with -1 the slice goes backwards.
    - `axis`: the axes, by default the first ones.

    Without start, stop and step the result is `t` itself.

    **Raises**: ValueError: if the lists have different lengths.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    ...     popxl.ops.slice(t, start=[None, 2], stop=[None, 0], step=[1, -1])
    Tensor[slice_out popxl.dtypes.float32 (2, 2)]
    """
    return _add_slice(SLICE, t, start, stop, step, axis)


def slice_(
    t: Tensor,
    start: Bounds = None,
    stop: Bounds = None,
    step: Bounds = None,
    axis: int | Sequence[int] | None = None,
) -> Tensor:
    """`slice` as a view: a change of the result changes `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.slice_(popxl.constant([1.0, 2.0, 3.0]), start=1)
    Tensor[sliceinplace_out popxl.dtypes.float32 (2,)]
    """
    return _add_slice(SLICE_INPLACE, t, start, stop, step, axis)


def process_args(
    start: Bounds = None,
    stop: Bounds = None,
    step: Bounds = None,
    axis: int | Sequence[int] | None = None,
) -> tuple[list[int], list[int], list[int], list[int]]:
    """All four as lists of one length, with numbers instead of None.

    **Raises**: ValueError: if the lists have different lengths.

    >>> process_args(stop=[None, 3], step=[-1, None])
    ([-1, 0], [-2147483648, 3], [-1, 1], [0, 1])
    """
    arguments = {"start": start, "stop": stop, "step": step, "axis": axis}
    listed = {name: _as_list(value) for name, value in arguments.items()}
    count = None
    for k, v in listed.items():
        if v is None:
            continue
        N = count = len(v) if count is None else count
        if len(v) != N:
            raise ValueError(f"All inputs must have same length. `{k}` has length {len(v)} != {N}.")
    steps = [1 if by is None else by for by in listed["step"] or [None] * (count or 0)]
    starts = _fill(listed["start"], steps, (0, -1))
    stops = _fill(listed["stop"], steps, (INT_MAX, INT_MIN))
    axes: Any = listed["axis"]
    return starts, stops, steps, list(range(count or 0)) if axes is None else axes


def _as_list(value: Bounds) -> list[int | None] | None:
    if value is None:
        return None
    return [value] if isinstance(value, int) else list(value)


def _fill(
    values: list[int | None] | None, steps: list[int], defaults: tuple[int, int]
) -> list[int]:
    """The values, with the default for a forward or a backward step instead of None."""
    forwards, backwards = defaults
    numbers = values or [None] * len(steps)
    return [
        (forwards if step > 0 else backwards) if value is None else value
        for value, step in zip(numbers, steps, strict=True)
    ]


def _add_slice(
    definition: Definition,
    t: Tensor,
    start: Bounds,
    stop: Bounds,
    step: Bounds,
    axis: int | Sequence[int] | None,
) -> Tensor:
    if start is None and stop is None and step is None:
        return t
    names = ("starts", "stops", "steps", "axes")
    attributes = dict(zip(names, map(tuple, process_args(start, stop, step, axis)), strict=True))
    return add_op(definition, [t], attributes)[0]


def subsample(t: Tensor, strides: int | Iterable[int]) -> Tensor:
    """Every n-th element along each axis, beginning with the first.

    **Arguments**: `strides`: a number for each axis, or for the first axes only.

    **Raises**: ValueError: if there are more numbers than axes, or one is not positive.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.subsample(popxl.constant([1.0, 2.0, 3.0]), 2)
    Tensor[subsample_out popxl.dtypes.float32 (2,)]
    """
    steps = [strides] if isinstance(strides, int) else list(strides)
    if len(steps) > t.rank:
        raise ValueError(
            "The length of subsample `strides` must not be greater than the rank of the input "
            "tensor."
        )
    if any(step < 1 for step in steps):
        raise ValueError(f"strides must be positive, but they are {steps}")
    count = len(steps)
    attributes = {
        "starts": (0,) * count,
        "stops": t.shape[:count],
        "steps": tuple(steps),
        "axes": tuple(range(count)),
    }
    return add_op(SUBSAMPLE, [t], attributes)[0]


# Slices that begin where a tensor says; beyond the end of an axis they continue at its beginning


def _window(axes: Iterable[int], sizes: Iterable[int], no_overlap: bool) -> dict[str, Any]:
    """The attributes of dynamic ops."""
    return {"axes": tuple(axes), "sizes": tuple(sizes), "no_overlap": bool(no_overlap)}


def _check_window(t: TensorSpec, index: TensorSpec, attributes: Attributes) -> tuple[int, ...]:
    """The shape of a dynamic slice, with the checks of its index."""
    check_integers(index, "index")
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


def _dynamic_positions(
    xp: ModuleType, shape: tuple[int, ...], index: Array, attributes: Attributes
) -> tuple[Any, ...]:
    """An open mesh of indices into [R, *shape]; each replica has its own start."""
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


def _dynamic_slice(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    t, index = inputs
    return [t[_dynamic_positions(xp, t.shape[1:], index, attributes)]]


def _dynamic_slice_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    dy, index = inputs
    shape = tuple(attributes["shape"])
    out = xp.zeros((dy.shape[0], *shape), dy.dtype)
    out[_dynamic_positions(xp, shape, index, attributes)] = dy
    return [out]


DYNAMIC_SLICE_PAD = Definition("DynamicSlicePadGrad", shape_spec, _dynamic_slice_gradient)
DYNAMIC_SLICE = Definition(
    "DynamicSlice",
    _dynamic_spec,
    _dynamic_slice,
    gradient_ops((DYNAMIC_SLICE_PAD, "1"), None),
    names=("t", "index"),
)


def dynamic_slice(
    t: Tensor, index: Tensor, axes: Iterable[int], sizes: Iterable[int], no_overlap: bool
) -> Tensor:
    """Copy a slice of `t` that begins at `index`.

    **Arguments**

    - `index`: an integer for each of `axes`. Beyond the end of an axis the slice continues at its
      beginning.
    - `axes`, `sizes`: the sliced axes, and the number of elements along each.
    - `no_overlap`: promises that slices do not overlap, for an IPU; no effect here.

    **Raises**

    - ValueError: if the lengths of the arguments differ, or a size is too large.
    - TypeError: if `index` does not hold integers.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.zeros((4, 3), np.float32))
    ...     popxl.ops.dynamic_slice(t, popxl.constant([1], popxl.uint32), [0], [2], True)
    Tensor[dynamicslice_out popxl.dtypes.float32 (2, 3)]
    """
    return add_op(DYNAMIC_SLICE, [t, index], _window(axes, sizes, no_overlap))[0]


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


def _updating(copy: bool) -> Callable[..., Arrays]:
    def run(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
        t, index, update = inputs
        out = t.copy() if copy else t
        positions = _dynamic_positions(xp, t.shape[1:], index, attributes)
        out[positions] = raise_rank(update, t.ndim - 1)
        return [out]

    return run


def _update_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    return [unbroadcast(xp, _dynamic_slice(xp, inputs, attributes)[0], attributes["shape"])]


def _dynamic_zero(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    dy, index = inputs
    out = dy.copy()
    out[_dynamic_positions(xp, dy.shape[1:], index, attributes)] = 0
    return [out]


DYNAMIC_ZERO = Definition("DynamicZeroGrad", shape_spec, _dynamic_zero)
DYNAMIC_UPDATE_GRAD = Definition("DynamicUpdateUpdaterGrad", shape_spec, _update_gradient)
DYNAMIC_UPDATE = Definition(
    "DynamicUpdate",
    _update_spec,
    _updating(copy=True),
    gradient_ops((DYNAMIC_ZERO, "1"), None, (DYNAMIC_UPDATE_GRAD, "1")),
    names=("t", "index", "t_update"),
)
DYNAMIC_UPDATE_INPLACE = Definition(
    "DynamicUpdateInplace",
    _update_spec,
    _updating(copy=False),
    aliases={0: 0},
    modifies=(0,),
    names=("t", "index", "t_update"),
)


def dynamic_update(
    t: Tensor,
    index: Tensor,
    t_update: Tensor,
    axes: Iterable[int],
    sizes: Iterable[int],
    no_overlap: bool,
) -> Tensor:
    """`t` with the slice that `dynamic_slice` would give replaced by `t_update`.

    Arguments and errors as in `dynamic_slice`.

    **Raises**: also ValueError: if `t_update` does not broadcast to the slice.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.zeros((4, 3), np.float32))
    ...     rows = popxl.constant(np.ones((2, 3), np.float32))
    ...     popxl.ops.dynamic_update(t, popxl.constant([1], popxl.uint32), rows, [0], [2], True)
    Tensor[dynamicupdate_out popxl.dtypes.float32 (4, 3)]
    """
    return add_op(DYNAMIC_UPDATE, [t, index, t_update], _window(axes, sizes, no_overlap))[0]


def dynamic_update_(
    t: Tensor,
    index: Tensor,
    t_update: Tensor,
    axes: Iterable[int],
    sizes: Iterable[int],
    no_overlap: bool,
) -> Tensor:
    """`dynamic_update` in place: `t` changes, and the result shares its memory.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.variable(np.zeros((4, 3), np.float32))
    ...     rows = popxl.constant(np.ones((2, 3), np.float32))
    ...     popxl.ops.dynamic_update_(t, popxl.constant([1], popxl.uint32), rows, [0], [2], True)
    Tensor[dynamicupdateinplace_out popxl.dtypes.float32 (4, 3)]
    """
    attributes = _window(axes, sizes, no_overlap)
    return add_op(DYNAMIC_UPDATE_INPLACE, [t, index, t_update], attributes)[0]
