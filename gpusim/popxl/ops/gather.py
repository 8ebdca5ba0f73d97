"""`gather` and its kin: the values at given places of an axis."""

from __future__ import annotations

from .._ops import indexing
from .._ops.definition import Definition, add_op
from ..tensor import Tensor

__all__ = ["gather", "groupedgather", "tied_gather"]


def gather(
    t: Tensor,
    indices: Tensor,
    axis: int = 0,
    available_memory_proportion: float | None = None,
    zero_OOR: bool = False,
) -> Tensor:
    """The values of `t` at the places `indices` of an axis, as numpy.take has them.

    **Arguments**

    - `indices`: integers of any shape, which takes the axis's place in the result's shape.
    - `axis`: negative ones count from the end.
    - `available_memory_proportion`: an IPU's; it changes nothing here.
    - `zero_OOR`: whether indices out of range give zeros; else they give any element.

    Raises:
        TypeError: for indices that are no integers.
        ValueError: for an axis that `t` has not.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.zeros((4, 3), np.float32))
    ...     popxl.ops.gather(t, popxl.constant([[0, 1], [3, 2]], popxl.int32))
    Tensor[gather_out popxl.dtypes.float32 (2, 2, 3)]
    """
    return _gather(indexing.GATHER, t, indices, axis, 1, zero_OOR)


def groupedgather(
    t: Tensor,
    indices: Tensor,
    axis: int = 0,
    group_size: int | None = 1,
    available_memory_proportion: float | None = None,
    zero_OOR: bool = False,
) -> Tensor:
    """`gather` for each group by itself: axis 0 of `t` and of `indices` is that of the groups.

    **Arguments**: `group_size`: the number of groups; with 1 there is no such axis. The others are
    those of `gather`; `axis` counts the axis of the groups too.

    Errors as those of `gather`, and ValueError where axis 0 is not that of the groups.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.zeros((2, 4, 3), np.float32))
    ...     indices = popxl.constant([[0, 1, 1], [3, 2, 3]], popxl.int32)
    ...     popxl.ops.groupedgather(t, indices, axis=1, group_size=2)
    Tensor[gather_out popxl.dtypes.float32 (2, 3, 3)]
    """
    return _gather(indexing.GATHER, t, indices, axis, group_size or 1, zero_OOR)


def tied_gather(
    t: Tensor,
    indices: Tensor,
    axis: int = 0,
    available_memory_proportion: float | None = None,
    zero_OOR: bool = False,
) -> Tensor:
    """`gather`, of a `t` that an IPU has laid out for a matmul; the values are the same.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.zeros((4, 3), np.float32))
    ...     popxl.ops.tied_gather(t, popxl.constant([0, 1], popxl.int32), axis=1)
    Tensor[poparttiedgather_out popxl.dtypes.float32 (4, 2)]
    """
    return _gather(indexing.TIED_GATHER, t, indices, axis, 1, zero_OOR)


def _gather(
    definition: Definition, t: Tensor, indices: Tensor, axis: int, groups: int, zero_OOR: bool
) -> Tensor:
    attributes = {"axis": axis, "group_size": groups, "zero_OOR": bool(zero_OOR)}
    return add_op(definition, [t, indices], attributes)[0]
