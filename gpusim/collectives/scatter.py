"""psum_scatter: each replica keeps its own slice of the sum."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reduction import Reduction
from .gather import all_gather
from .groupwise import by_replica, fold_all, fold_groups
from .linear import linear
from .operand import Array, GroupsLike, Operand, Result, Values
from .sums import sum_arguments


@linear
def psum_scatter(
    x: Values,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    groups: GroupsLike = None,
    reduction: Reduction | None = None,
    batch_ndim: int = 0,
    call: int | None = None,
    places: Any = None,
) -> Result:
    """The sum over each group, cut along an axis: the member at position p receives slice p.

    **Arguments** as `psum`, except that groups have one size n. ``scatter_dimension`` counts in a
    replica's value and may be negative. Its size must be n and the axis goes (``tiled`` False), or
    a multiple of n, and it becomes that many times shorter (``tiled`` True).

    **Returns** slices of the sum, mapped; in `ring` order the ring's blocks are these slices.

    **Raises** ValueError where sizes do not fit, AxisError for an axis out of range, and, as JAX
    does, TypeError for bool.

    >>> psum_scatter(np.arange(16).reshape(4, 4))
    Result(value=array([24, 28, 32, 36]), mapped=True)
    """
    operand = Operand(x, batch_ndim, "psum_scatter")
    partition = operand.groups(groups)
    count = operand.size if partition is None else partition.group_size
    axis = scattered_axis(operand, scatter_dimension, tiled, count)
    how = sum_arguments(reduction, call, "psum_scatter")
    if how["order"] == "ring":
        how["cut_axis"] = axis
    cut = operand.batch_ndim + axis
    if partition is None:
        return operand.mapped(_slices(fold_all(operand, places, **how), cut, count, tiled))
    totals = fold_groups(operand, partition, places, **how)
    if operand.listed:
        slices = [_slices(total, cut, count, tiled) for total in totals]
        position = {r: (g, p) for g, row in enumerate(partition.members) for p, r in enumerate(row)}
        at = (position[replica] for replica in range(operand.size))
        return Result([slices[g][p, ...] for g, p in at], True)
    if isinstance(totals, list):
        return Result(by_replica([_slices(t, cut, count, tiled) for t in totals], partition), True)
    return Result(
        by_replica(_slices(totals, cut + 1, count, tiled).swapaxes(0, 1), partition), True
    )


def scattered_axis(operand: Operand, scatter_dimension: int, tiled: bool, count: int) -> int:
    """The value's axis that is cut among ``count`` members, checked; and a dtype that adds."""
    axis = operand.axis(scatter_dimension, "scatter_dimension")
    length = operand.shape[axis]
    if length % count if tiled else length != count:
        expected = f"a multiple of {count}" if tiled else f"{count}"
        raise ValueError(
            f"psum_scatter (tiled={tiled}) needs {expected} elements, as many as a group has "
            f"replicas, along scatter_dimension {scatter_dimension}, got shape {operand.shape}"
        )
    if operand.dtype == np.bool_:
        raise TypeError("psum_scatter: bool cannot be added, convert it to an integer type first")
    return axis


def _slices(total: Array, cut: int, count: int, tiled: bool) -> Array:
    """The sum as (count, ...), a view: its slices along axis ``cut``, in front."""
    if tiled:
        shape = total.shape
        total = total.reshape(*shape[:cut], count, shape[cut] // count, *shape[cut + 1 :])
    return np.moveaxis(total, cut, 0)


def _psum_scatter_transpose(
    ct: Values,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    groups: GroupsLike = None,
    batch_ndim: int = 0,
) -> Result:
    """The cotangents of the slices, gathered: every replica contributed to all of them."""
    return all_gather(ct, axis=scatter_dimension, tiled=tiled, groups=groups, batch_ndim=batch_ndim)


psum_scatter.transpose = _psum_scatter_transpose


def _all_gather_transpose(
    ct: Values,
    *,
    axis: int = 0,
    tiled: bool = False,
    groups: GroupsLike = None,
    reduction: Reduction | None = None,
    batch_ndim: int = 0,
    call: int | None = None,
    places: Any = None,
) -> Result:
    """The sum over the replicas of each replica's part of the gathered value's cotangent."""
    return psum_scatter(
        ct,
        scatter_dimension=axis,
        tiled=tiled,
        groups=groups,
        reduction=reduction,
        batch_ndim=batch_ndim,
        call=call,
        places=places,
    )


all_gather.transpose = _all_gather_transpose
