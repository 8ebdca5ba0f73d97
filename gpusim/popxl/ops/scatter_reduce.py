"""`scatter_reduce`, `grouped_scatter_reduce`: elements gathered up at given places of an axis."""

from __future__ import annotations

from typing import Literal

from .._ops import indexing
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["grouped_scatter_reduce", "scatter_reduce"]

ScatterReductionType = Literal["sum", "min", "max", "none"]


def scatter_reduce(
    data: Tensor,
    indices: Tensor,
    reduction: ScatterReductionType,
    initial_values: Tensor | None = None,
    axis: int = 0,
    axis_size: int | None = None,
    enable_index_broadcast: int = True,
    available_memory_proportion: float | None = None,
) -> Tensor:
    """The elements of `data` that go to one place of an axis, reduced to one.

    **Arguments**

    - `indices`: integers that broadcast to the shape of `data`; a row of them lies along `axis`.
    - `reduction`: "sum", "min" or "max"; with "none" the last element stays.
    - `initial_values`: what takes part at every place; without it a place that nothing goes to
      is 0.
    - `axis_size`: the length of the axis in the result, by default that of `initial_values`.
    - the others are an IPU's, and change nothing here.

    Raises:
        TypeError: for indices that are no integers.
        ValueError: for other shapes or another reduction, and where neither `initial_values` nor
            `axis_size` is given.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     data = popxl.constant([[1.0, 2.0], [3.0, 4.0]])
    ...     indices = popxl.constant([2, 2], popxl.int32)
    ...     popxl.ops.scatter_reduce(data, indices, "sum", axis_size=3)
    Tensor[scatterreduce_out popxl.dtypes.float32 (3, 2)]
    """
    return _reduce(data, indices, reduction, initial_values, axis, axis_size, False)


def grouped_scatter_reduce(
    data: Tensor,
    indices: Tensor,
    reduction: ScatterReductionType,
    initial_values: Tensor | None = None,
    axis: int = 0,
    axis_size: int | None = None,
    group_size: int = 1,
    enable_index_broadcast: bool = True,
    available_memory_proportion: float | None = None,
) -> Tensor:
    """`scatter_reduce` for each group by itself: axis 0 of all tensors is that of the groups.

    **Arguments**: `group_size`: the number of groups; with 1 there is no such axis. The others and
    the errors are those of `scatter_reduce`; `axis` counts the axis of the groups too.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     data = popxl.constant([[1.0, 2.0], [3.0, 4.0]])
    ...     indices = popxl.constant([[0, 2], [1, 1]], popxl.int32)
    ...     popxl.ops.grouped_scatter_reduce(
    ...         data, indices, "sum", axis=1, axis_size=3, group_size=2)
    Tensor[scatterreduce_out popxl.dtypes.float32 (2, 3)]
    """
    if group_size > 1 and {data.shape[:1], indices.shape[:1]} != {(group_size,)}:
        raise ValueError(
            f"Axis 0 of data and of indices must be that of the {group_size} groups, but the "
            f"shapes are {data.shape} and {indices.shape}"
        )
    return _reduce(data, indices, reduction, initial_values, axis, axis_size, group_size > 1)


def _reduce(
    data: Tensor,
    indices: Tensor,
    reduction: str,
    initial_values: Tensor | None,
    axis: int,
    axis_size: int | None,
    grouped: bool,
) -> Tensor:
    if axis_size is None:
        if initial_values is None:
            raise ValueError("One of initial_values and axis_size must be specified")
        axis_size = initial_values.shape[axis]
    if reduction not in indexing.REDUCTIONS:
        raise ValueError(f"The reduction must be one of {list(indexing.REDUCTIONS)}")
    inputs = [data, indices] if initial_values is None else [data, indices, initial_values]
    attributes = {
        "axis": axis,
        "axis_size": axis_size,
        "reduction": reduction,
        "grouped": grouped,
    }
    return add_op(indexing.SCATTER_REDUCE, inputs, attributes)[0]
