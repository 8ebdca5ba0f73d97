"""`max`, `maximum`: the greatest element along axes, and of several tensors."""

from __future__ import annotations

from collections.abc import Iterable

from .._ops import elementwise, reductions
from .._ops.definition import add_op
from ..tensor import Tensor
from .utils import reduced_axes

__all__ = ["max", "maximum"]


def max(t: Tensor, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
    """The greatest element along axes.

    Each that is it gets the whole gradient.

    **Arguments**

    - `axis`: one axis or several, negative ones from the end; by default all.
    - `keepdims`: whether the axes stay, with a length of 1.

    ValueError for an axis that `t` has not.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.max(popxl.constant([[1.0, 2.0], [3.0, 4.0]]), axis=-1)
    Tensor[reducemax_out popxl.dtypes.float32 (2,)]
    """
    return add_op(reductions.REDUCE_MAX, [t], reduced_axes(axis, keepdims))[0]


def maximum(*ts: Tensor) -> Tensor:
    """The greatest of the tensors' elements in each place.

    Shapes broadcast as NumPy's. Each that is the greatest gets the whole gradient.

    Raises:
        TypeError: for different dtypes.
        ValueError: for shapes that do not broadcast, and for no tensors.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.maximum(popxl.constant([1.0, 5.0]), popxl.constant(2.0))
    Tensor[max_out popxl.dtypes.float32 (2,)]
    """
    if not ts:
        raise ValueError("maximum needs one tensor at least")
    return add_op(elementwise.MAX, ts)[0]
