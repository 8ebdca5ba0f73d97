"""Slices at indices that are known at run time, with JAX's clamping of the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..maps.arguments import as_array
from ..maps.mapped_array import at
from ..maps.mapped_array.array import MappedArray, unpack

AllowNegative = bool | Sequence[bool]


def dynamic_slice(
    operand: Any,
    start_indices: Any,
    slice_sizes: Sequence[int],
    *,
    allow_negative_indices: AllowNegative = True,
) -> Any:
    """The slice of `operand` of `slice_sizes` that begins at `start_indices`.

    A start is moved so that the slice lies inside, as in JAX; plain NumPy indexing shortens the
    slice or raises.

    **Arguments**:

    - `operand`: an array.
    - `start_indices`: an integer for each axis, which may differ between replicas; negative ones
      count from the end.
    - `slice_sizes`: the shape of the result.
    - `allow_negative_indices`: False, for all axes or for each: negative starts do not count from
      the end.

    **Returns**: a new array.

    **Raises**:

    - ValueError: if the numbers of indices, sizes and axes differ, or a negative Python int is
      not allowed.
    - TypeError: if a start is not an integer, or the slice is larger than the array.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> lax.dynamic_slice(np.arange(5), (4,), (3,))
    array([2, 3, 4])
    >>> gpusim.vmap(lambda i: lax.dynamic_slice(np.arange(5), (i,), (2,)))(np.array([1, -3]))
    array([[1, 2],
           [2, 3]])
    """
    operand = as_array(operand, "dynamic_slice's operand")
    sizes = tuple(slice_sizes)
    if len(sizes) != operand.ndim or any(
        not 0 <= size <= length for size, length in zip(sizes, operand.shape, strict=True)
    ):
        raise TypeError(
            f"dynamic_slice's slice_sizes {sizes} do not fit into the operand's shape "
            f"{operand.shape}"
        )
    return (
        at(operand)[_place("dynamic_slice", operand, start_indices, sizes, allow_negative_indices)]
        .get()
        .copy()
    )


def dynamic_update_slice(
    operand: Any,
    update: Any,
    start_indices: Any,
    *,
    allow_negative_indices: AllowNegative = True,
) -> Any:
    """A copy of `operand` with `update` in it, which begins at `start_indices`.

    **Arguments**:

    - `operand`: an array.
    - `update`: an array of the same dtype and number of axes, and no larger.
    - `start_indices`, `allow_negative_indices`: as in `dynamic_slice`.

    **Returns**: a new array.

    **Raises**: as `dynamic_slice`, and TypeError: if the update does not fit.

    >>> import numpy as np
    >>> from gpusim import lax
    >>> lax.dynamic_update_slice(np.zeros(5), np.ones(2), (7,))
    array([0., 0., 0., 1., 1.])
    """
    operand = as_array(operand, "dynamic_update_slice's operand")
    update = _as_update(update, operand, "dynamic_update_slice")
    if update.ndim != operand.ndim or any(
        size > length for size, length in zip(update.shape, operand.shape, strict=True)
    ):
        raise TypeError(
            f"dynamic_update_slice's update of shape {update.shape} does not fit into the "
            f"operand's shape {operand.shape}"
        )
    place = _place(
        "dynamic_update_slice", operand, start_indices, update.shape, allow_negative_indices
    )
    return at(operand)[place].set(update)


def dynamic_slice_in_dim(
    operand: Any,
    start_index: Any,
    slice_size: int,
    axis: int = 0,
    *,
    allow_negative_indices: bool = True,
) -> Any:
    """`dynamic_slice` along one axis.

    >>> import numpy as np
    >>> from gpusim import lax
    >>> lax.dynamic_slice_in_dim(np.arange(6).reshape(2, 3), 1, 2, axis=1)
    array([[1, 2],
           [4, 5]])
    """
    operand = as_array(operand, "dynamic_slice_in_dim's operand")
    starts, axis = _starts_along(operand, start_index, axis)
    sizes = (*operand.shape[:axis], slice_size, *operand.shape[axis + 1 :])
    return dynamic_slice(operand, starts, sizes, allow_negative_indices=allow_negative_indices)


def dynamic_update_slice_in_dim(
    operand: Any,
    update: Any,
    start_index: Any,
    axis: int,
    *,
    allow_negative_indices: bool = True,
) -> Any:
    """`dynamic_update_slice` along one axis.

    >>> import numpy as np
    >>> from gpusim import lax
    >>> lax.dynamic_update_slice_in_dim(np.zeros((2, 3)), np.ones((2, 1)), -1, axis=1)
    array([[0., 0., 1.],
           [0., 0., 1.]])
    """
    operand = as_array(operand, "dynamic_update_slice_in_dim's operand")
    starts, _ = _starts_along(operand, start_index, axis)
    return dynamic_update_slice(
        operand, update, starts, allow_negative_indices=allow_negative_indices
    )


def dynamic_index_in_dim(
    operand: Any,
    index: Any,
    axis: int = 0,
    keepdims: bool = True,
    *,
    allow_negative_indices: bool = True,
) -> Any:
    """The entry `index` along an axis, clamped into it; with `keepdims` the axis has length 1.

    >>> import numpy as np
    >>> from gpusim import lax
    >>> lax.dynamic_index_in_dim(np.arange(6).reshape(2, 3), 9, keepdims=False)
    array([3, 4, 5])
    """
    found = dynamic_slice_in_dim(
        operand, index, 1, axis, allow_negative_indices=allow_negative_indices
    )
    return found if keepdims else np.squeeze(found, axis)


def dynamic_update_index_in_dim(
    operand: Any,
    update: Any,
    index: Any,
    axis: int,
    *,
    allow_negative_indices: bool = True,
) -> Any:
    """`dynamic_update_slice` of the entry `index` along an axis, which `update` may lack.

    >>> import numpy as np
    >>> from gpusim import lax
    >>> lax.dynamic_update_index_in_dim(np.zeros((2, 3)), np.ones(3), 1, axis=0)
    array([[0., 0., 0.],
           [1., 1., 1.]])
    """
    operand = as_array(operand, "dynamic_update_index_in_dim's operand")
    update = _as_update(update, operand, "dynamic_update_index_in_dim")
    if update.ndim == operand.ndim - 1:
        update = np.expand_dims(update, axis)
    return dynamic_update_slice_in_dim(
        operand, update, index, axis, allow_negative_indices=allow_negative_indices
    )


def _as_update(update: Any, operand: Any, what: str) -> Any:
    weak = isinstance(update, (int, float, complex)) and not isinstance(update, np.generic)
    update = np.asarray(update, operand.dtype) if weak else as_array(update, f"{what}'s update")
    if update.dtype != operand.dtype:
        raise TypeError(
            f"{what} needs arguments of one dtype, but got {operand.dtype} and {update.dtype}"
        )
    return update


def _starts_along(operand: Any, start: Any, axis: int) -> tuple[list[Any], int]:
    axis = np.lib.array_utils.normalize_axis_index(axis, operand.ndim)
    starts: list[Any] = [0] * operand.ndim
    starts[axis] = start
    return starts, axis


def _place(
    what: str, operand: Any, start_indices: Any, sizes: Sequence[int], negative: AllowNegative
) -> tuple[Any, ...]:
    """The index expression of a slice of these sizes."""
    starts = [*start_indices]
    if len(starts) != operand.ndim:
        raise ValueError(
            f"{what} needs a start index for each axis of the operand of shape {operand.shape}, "
            f"but got {len(starts)}"
        )
    allowed = [negative] * len(starts) if isinstance(negative, bool) else [*negative]
    if len(allowed) != len(starts):
        raise ValueError(
            f"{what}'s allow_negative_indices has {len(allowed)} entries for {len(starts)} axes"
        )
    starts = [
        _clamp(what, *each) for each in zip(starts, operand.shape, sizes, allowed, strict=True)
    ]
    mapped = [start for start in starts if isinstance(start, MappedArray)]
    if len(mapped) > 1:  # NumPy would move the axes
        spans = [
            start + np.arange(size, like=mapped[0])
            for start, size in zip(starts, sizes, strict=True)
        ]
        return tuple(
            span.reshape((-1,) + (1,) * (operand.ndim - 1 - axis))
            for axis, span in enumerate(spans)
        )
    return tuple(
        start + np.arange(size, like=start)
        if isinstance(start, MappedArray)
        else slice(start, start + size)
        for start, size in zip(starts, sizes, strict=True)
    )


def _clamp(what: str, start: Any, length: int, size: int, negative: bool) -> Any:
    """A start, counted from the front and moved so that `size` elements follow."""
    array = as_array(start, f"{what}'s start index")
    if array.dtype.kind not in "iu" or array.shape:
        raise TypeError(
            f"{what}'s start indices must be integer scalars, but one has dtype {array.dtype} and "
            f"shape {array.shape}"
        )
    if type(start) is int and start < 0 and not negative:
        raise ValueError(f"{what}'s start index {start} is negative (allow_negative_indices=False)")
    if unpack(array)[1]:
        if array.dtype.kind == "i" and negative:
            array = np.where(array < 0, array + np.int64(length), array)
        return np.clip(array, 0, length - size).astype(np.int64)
    start = int(array)
    return min(max(start + length if start < 0 and negative else start, 0), length - size)
