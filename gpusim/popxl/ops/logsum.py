"""`logsum`: the natural logarithm of the sum, along axes."""

from __future__ import annotations

from collections.abc import Iterable

from .._ops import reductions
from .._ops.definition import add_op
from ..tensor import Tensor
from .utils import reduced_axes

__all__ = ["logsum"]


def logsum(t: Tensor, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
    """The natural logarithm of the sum along axes.

    **Arguments**

    - `axis`: one axis or several, negative ones from the end; by default all.
    - `keepdims`: whether the axes stay, with a length of 1.

    float16 is added up in float32. ValueError for an axis that `t` has not.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.logsum(popxl.constant([[1.0, 2.0], [3.0, 4.0]]), axis=-1)
    Tensor[reducelogsum_out popxl.dtypes.float32 (2,)]
    """
    return add_op(reductions.REDUCE_LOG_SUM, [t], reduced_axes(axis, keepdims))[0]
