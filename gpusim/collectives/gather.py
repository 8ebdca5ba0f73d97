"""all_gather and pgather: values of all replicas, or of chosen ones, on every replica."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ReplicaIndexError
from .groupwise import by_group, spread
from .kernels import copy, empty
from .linear import linear
from .operand import (
    Array,
    GroupsLike,
    Operand,
    Result,
    Values,
    read_only,
    read_only_alias,
    unstacked,
)


@linear
def all_gather(
    x: Values,
    *,
    axis: int = 0,
    tiled: bool = False,
    groups: GroupsLike = None,
    batch_ndim: int = 0,
) -> Result:
    """The values of each group, stacked along a new axis or concatenated along an old one.

    **Arguments**: ``x`` stacked (R, *batch, *s), or a list of R arrays. ``axis`` counts in the
    result, batch axes left out: a new one of size R (``tiled`` False), or one of s that becomes R
    times longer (``tiled`` True). Negative ones count from the end. Groups have one size.

    **Returns** the gathered value, not mapped; with groups each replica's, mapped. It is a
    read-only view of a stacked ``x`` where it can be one; a ``tiled`` one is usually a copy.

    **Raises** AxisError for an axis out of range, ValueError for groups that do not fit.

    >>> all_gather(np.array([[1, 2], [3, 4], [5, 6]]), axis=1)
    Result(value=array([[1, 3, 5], [2, 4, 6]]), mapped=False)
    >>> all_gather(np.arange(4), groups=[[0, 2], [3, 1]]).value.tolist()
    [[0, 2], [3, 1], [0, 2], [3, 1]]
    """
    operand = Operand(x, batch_ndim, "all_gather")
    axis = operand.batch_ndim + operand.axis(axis, "axis", operand.ndim + (not tiled))
    partition = operand.groups(groups)
    if partition is None:
        if operand.listed and not operand.same:
            return Result(join(operand.values, axis, tiled), False)
        gathered = _gather(operand.stacked(), axis, tiled)
        return Result(_own(gathered, operand), False)
    if operand.listed:
        lists = (operand.members(group) for group in partition.members)
        return spread([join(members, axis, tiled) for members in lists], operand, partition)
    # The groups' own axis is one more batch axis behind their members'.
    members = by_group(operand.stacked(), partition).swapaxes(0, 1)
    return spread(_gather(members, axis + 1, tiled), operand, partition)


def join(members: list[Array], axis: int, tiled: bool) -> Array:
    """Arrays of a list stacked along a new axis, or concatenated along an old one."""
    shape, count = members[0].shape, len(members)
    joined = empty(members[0], (*shape[:axis], count, *shape[axis:]))
    place: tuple[Any, ...] = (slice(None),) * axis
    copy([(joined[(*place, number, ...)], member) for number, member in enumerate(members)])
    if not tiled:
        return joined
    return joined.reshape(*shape[:axis], count * shape[axis], *shape[axis + 1 :])


def _gather(members: Array, axis: int, tiled: bool) -> Array:
    """Members (n, ...) with their axis moved to ``axis``, and merged with the one there."""
    gathered = np.moveaxis(members, 0, axis)
    if not tiled:
        return gathered
    shape = gathered.shape
    return gathered.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _own(gathered: Array, operand: Operand) -> Array:
    return read_only(gathered) if operand.listed else read_only_alias(gathered, operand)


def pgather(src: Values, idx: Values, *, batch_ndim: int = 0) -> Result:
    """For each index, the value of the replica with that number.

    **Arguments**: ``src`` stacked (R, *batch, *s) and ``idx`` stacked (R, *batch, *k), integers
    from 0 to R - 1; either may be a list of R arrays. Indices that are the same on all replicas
    are handed in broadcast along axis 0, ``np.broadcast_to(idx, (R, *idx.shape))``.

    **Returns** (*batch, *k, *s), mapped if the indices are; for one index that is the same on all
    replicas a read-only view.

    **Raises** TypeError for indices that are no integers, `ReplicaIndexError` out of range.

    >>> pgather(np.array([10, 20, 30]), np.broadcast_to([2, 0], (3, 2)))
    Result(value=array([30, 10]), mapped=False)
    """
    source = Operand(src, batch_ndim, "pgather")
    chosen = Operand(idx, batch_ndim, "pgather (idx)")
    check_indices(source, chosen)
    if not chosen.same:
        values = choose(source, chosen.stacked(), mapped=True)
        return Result(unstacked(values) if source.listed or chosen.listed else values, True)
    if chosen[0].ndim == 0:
        return Result(read_only(source[int(chosen[0])]), False)
    return Result(choose(source, chosen[0], mapped=False), False)


def check_indices(source: Operand, chosen: Operand, size: int | None = None) -> None:
    """Refuse what are no replica numbers; there are ``size`` replicas, if not those of source."""
    size = source.size if size is None else size
    if chosen.dtype.kind not in "iu":
        raise TypeError(f"pgather: idx must be integers, got {chosen.dtype}")
    if (chosen.size, chosen.batch_shape) != (source.size, source.batch_shape):
        raise ValueError(
            f"pgather: src has replica and batch axes {(source.size, *source.batch_shape)}, "
            f"idx has {(chosen.size, *chosen.batch_shape)}"
        )
    for numbers in chosen.values if chosen.listed else (chosen.values,):
        wrong = (numbers < 0) | (numbers >= size)
        if wrong.any():
            raise ReplicaIndexError(
                f"pgather: idx must be replica numbers from 0 to {size - 1}, "
                f"got {numbers[wrong][0]}"
            )


def choose(source: Operand, numbers: Array, *, mapped: bool) -> Array:
    """The rows of the source at (R,) *batch, *k: from each batch entry its own."""
    if source.listed:
        return _choose_from_list(source, numbers, mapped)
    entries: list[Any] = []
    for axis, length in enumerate(source.batch_shape, start=int(mapped)):
        entries.append(np.arange(length).reshape(-1, *[1] * (numbers.ndim - axis - 1)))
    chosen: Array = source.values[(numbers, *entries)]
    return chosen


def _choose_from_list(source: Operand, numbers: Array, mapped: bool) -> Array:
    """The same, one source replica at a time: a list is never stacked as a whole."""
    first = source[0]
    chosen = empty(first, (*numbers.shape, *source.shape))
    for replica in np.unique(numbers).tolist():
        where = numbers == replica
        entries = np.nonzero(where)[int(mapped) :][: source.batch_ndim]
        chosen[where] = source[replica][entries]
    return chosen
