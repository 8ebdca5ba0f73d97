"""all_to_all and pswapaxes: the replica axis changes places with an axis of the value."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..groups import Groups
from .groupwise import by_group, by_replica
from .kernels import copy, empty
from .linear import linear
from .operand import Array, GroupsLike, Operand, Result, Values, read_only_alias


@linear
def all_to_all(
    x: Values,
    split_axis: int,
    concat_axis: int,
    *,
    tiled: bool = False,
    groups: GroupsLike = None,
    batch_ndim: int = 0,
) -> Result:
    """Each value is cut along ``split_axis``, one piece for each member of the group; what a member
    receives is put together along ``concat_axis``, in the order of the senders.

    **Arguments**: ``x`` stacked (R, *batch, *s), or a list of R arrays; the axes count in s and may
    be negative. With ``tiled`` False, s[split_axis] must be the group's size n: the axis goes, and
    a new one of size n stands at ``concat_axis`` of the result. With ``tiled`` True, s[split_axis]
    must be a multiple of n and becomes n times shorter, s[concat_axis] n times longer. Groups have
    one size.

    **Returns** (R, *batch, *s'), mapped: a read-only view of a stacked ``x`` where it can be one.

    **Raises** ValueError where sizes do not fit, AxisError for an axis out of range.

    >>> all_to_all(np.array([["a0", "a1"], ["b0", "b1"]]), 0, 0).value.tolist()
    [['a0', 'b0'], ['a1', 'b1']]
    """
    return _all_to_all(Operand(x, batch_ndim, "all_to_all"), split_axis, concat_axis, tiled, groups)


def _all_to_all_transpose(
    ct: Values,
    split_axis: int,
    concat_axis: int,
    *,
    tiled: bool = False,
    groups: GroupsLike = None,
    batch_ndim: int = 0,
) -> Result:
    """The pieces go back the way they came: split and concat axes swapped."""
    return all_to_all(
        ct, concat_axis, split_axis, tiled=tiled, groups=groups, batch_ndim=batch_ndim
    )


all_to_all.transpose = _all_to_all_transpose


@linear
def pswapaxes(x: Values, axis: int, *, groups: GroupsLike = None, batch_ndim: int = 0) -> Result:
    """The replica axis and ``axis`` swapped: ``all_to_all(x, axis, axis)``.

    >>> pswapaxes(np.array([[1, 2], [3, 4]]), 0)
    Result(value=array([[1, 3], [2, 4]]), mapped=True)
    """
    return _all_to_all(Operand(x, batch_ndim, "pswapaxes"), axis, axis, False, groups)


pswapaxes.transpose = pswapaxes  # swapping two axes is its own inverse


def _all_to_all(
    operand: Operand, split_axis: int, concat_axis: int, tiled: bool, groups: GroupsLike
) -> Result:
    partition = operand.groups(groups)
    count = operand.size if partition is None else partition.group_size
    split, concat = exchanged_axes(operand, split_axis, concat_axis, tiled, count)
    if operand.listed:
        return _exchange_lists(operand, split, concat, tiled, partition)
    if partition is None:
        y = _exchange(operand.values, split, concat, tiled)
        return Result(read_only_alias(y, operand), True)
    # The groups' own axis is one more batch axis behind their members'.
    members = by_group(operand.values, partition).swapaxes(0, 1)
    y = _exchange(members, split + 1, concat + 1, tiled)
    return Result(by_replica(y.swapaxes(0, 1), partition), True)


def exchanged_axes(
    operand: Operand, split_axis: int, concat_axis: int, tiled: bool, count: int
) -> tuple[int, int]:
    """The two axes, checked for groups of ``count``; batch axes are counted in."""
    split = operand.axis(split_axis, "split_axis")
    concat = operand.axis(concat_axis, "concat_axis")
    length = operand.shape[split]
    if length % count if tiled else length != count:
        expected = f"a multiple of {count}" if tiled else f"{count}"
        raise ValueError(
            f"{operand.collective} (tiled={tiled}) needs {expected} elements, as many as a group "
            f"has replicas, along split_axis {split_axis}, got shape {operand.shape}"
        )
    return split + operand.batch_ndim, concat + operand.batch_ndim


def _exchange(x: Array, split: int, concat: int, tiled: bool) -> Array:
    """Senders (n, ...) to receivers (n, ...); axes count in one member's array."""
    if tiled:
        x = cut(x, split + 1, x.shape[0])
    y = np.moveaxis(np.moveaxis(x, split + 1, 0), 1, concat + 1)
    return merge(y, concat + 1) if tiled else y


def _exchange_lists(
    operand: Operand, split: int, concat: int, tiled: bool, groups: Groups | None
) -> Result:
    """Each sender's pieces are written into all receivers' arrays at once, without stacking."""
    received: dict[int, Array] = {}
    members = (tuple(range(operand.size)),) if groups is None else groups.members
    for group in members:
        sent = [
            np.moveaxis(cut(operand[r], split, len(group)) if tiled else operand[r], split, 0)
            for r in group
        ]
        shape = (*sent[0].shape[: concat + 1], len(group), *sent[0].shape[concat + 1 :])
        y = empty(sent[0], shape)
        place: tuple[Any, ...] = (slice(None),) * (concat + 1)
        copy([(y[(*place, sender, ...)], pieces) for sender, pieces in enumerate(sent)])
        received |= zip(group, merge(y, concat + 1) if tiled else y, strict=True)
    return Result([received[replica] for replica in range(operand.size)], True)


def cut(x: Array, axis: int, count: int) -> Array:
    """One axis as two, (count, what is left): always a view."""
    shape = x.shape
    return x.reshape(*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :])


def merge(x: Array, axis: int) -> Array:
    """An axis and the next one as one: a view where memory allows."""
    shape = x.shape
    merged = (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    try:
        return np.reshape(x, merged, copy=False)
    except ValueError:
        copied = empty(x)
        copy([(copied, x)])
        return copied.reshape(merged)
