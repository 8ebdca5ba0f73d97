"""`scatter`: elements replaced at given places of an axis."""

from __future__ import annotations

from .._ops import indexing
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["scatter"]


def scatter(
    t: Tensor,
    indices: Tensor,
    values: Tensor,
    axis: int = 0,
    available_memory_proportion: float | None = None,
) -> Tensor:
    """`t` with each element of `values` in its own place, but for `axis`, where its index is it.

    **Arguments**

    - `indices`, `values`: of one shape, and of the rank of `t`; of elements that go to one place
      the last stays.
    - `available_memory_proportion`: an IPU's; it changes nothing here.

    Raises:
        TypeError: for indices that are no integers, or different dtypes.
        ValueError: for other shapes.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     indices = popxl.constant([2, 0], popxl.int32)
    ...     popxl.ops.scatter(popxl.constant([1.0, 2.0, 3.0]), indices, popxl.constant([5.0, 6.0]))
    Tensor[scatter_out popxl.dtypes.float32 (3,)]
    """
    return add_op(indexing.SCATTER, [t, indices, values], {"axis": axis})[0]
