"""`median`: the middle element along axes."""

from __future__ import annotations

from collections.abc import Iterable

from .._ops import reductions
from .._ops.definition import add_op
from ..tensor import Tensor
from .utils import reduced_axes

__all__ = ["median"]


def median(t: Tensor, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
    """The middle element along axes; the lower of two.

    **Arguments**

    - `axis`: one axis or several, negative ones from the end; by default all.
    - `keepdims`: whether the axes stay, with a length of 1.

    ValueError for an axis that `t` has not.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.median(popxl.constant([[1.0, 2.0, 5.0], [3.0, 4.0, 0.0]]), axis=-1)
    Tensor[reducemedian_out popxl.dtypes.float32 (2,)]
    """
    return add_op(reductions.REDUCE_MEDIAN, [t], reduced_axes(axis, keepdims))[0]
