"""`reshape`, `flatten`, and both in place: the same elements in another shape."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .._ops import shapes
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["flatten", "flatten_", "reshape", "reshape_", "reshape_handle_negative_axis"]


def reshape_handle_negative_axis(t: Tensor, shape: Iterable[int]) -> tuple[int, ...]:
    """The shape with -1 replaced by what the other axes leave of `t`."""
    sizes = tuple(shape)
    if -1 not in sizes:
        return sizes
    rest = math.prod(size for size in sizes if size != -1)
    return tuple(t.nelms // rest if size == -1 and rest else size for size in sizes)


def _checked(t: Tensor, shape: Iterable[int]) -> tuple[int, ...]:
    sizes = tuple(shape)
    if any(size < -1 or (size == 0 and t.nelms) for size in sizes):
        raise ValueError(f"Invalid shape value in reshape. Must be '>0' or '-1'. Provided {sizes}.")
    if sizes.count(-1) > 1:
        raise ValueError(f"Reshape shape can contain at most one '-1' value. Provided {sizes}.")
    return reshape_handle_negative_axis(t, sizes)


def reshape(t: Tensor, shape: Iterable[int]) -> Tensor:
    """The elements of `t`, in C order, in another shape; one axis may be -1: what is left.

    ValueError for a shape of another number of elements, or several axes of -1.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.reshape(popxl.constant([1.0, 2.0, 3.0, 4.0]), (2, -1))
    Tensor[reshape_out popxl.dtypes.float32 (2, 2)]
    """
    return add_op(shapes.RESHAPE, [t], {"shape": _checked(t, shape)})[0]


def reshape_(t: Tensor, shape: Iterable[int]) -> Tensor:
    """`reshape` as a view: what changes it changes `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.reshape_(popxl.constant([1.0, 2.0, 3.0, 4.0]), (2, -1))
    Tensor[reshapeinplace_out popxl.dtypes.float32 (2, 2)]
    """
    return add_op(shapes.RESHAPE_INPLACE, [t], {"shape": _checked(t, shape)})[0]


def flatten(t: Tensor) -> Tensor:
    """The elements of `t`, in C order, along one axis.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.flatten(popxl.constant([[1.0, 2.0]]))
    Tensor[reshape_out popxl.dtypes.float32 (2,)]
    """
    return reshape(t, (t.nelms,))


def flatten_(t: Tensor) -> Tensor:
    """`flatten` as a view: what changes it changes `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.flatten_(popxl.constant([[1.0, 2.0]]))
    Tensor[reshapeinplace_out popxl.dtypes.float32 (2,)]
    """
    return reshape_(t, (t.nelms,))
