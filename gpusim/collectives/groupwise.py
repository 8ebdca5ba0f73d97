"""From values per replica to values per group and back, and the fold of each group."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..groups import Groups
from ..libraries import on_device
from .kernels import copy, empty, kernels, rows
from .operand import Array, Operand, Result, read_only


def by_group(x: Array, groups: Groups) -> Array:
    """(R, ...) as (groups, group size, ...): a view of consecutive and of orthogonal groups."""
    if not groups.strided:
        return x[groups.matrix]
    blocks = _blocks(x, groups).swapaxes(1, 2)
    return blocks.reshape(groups.group_count, groups.group_size, *x.shape[1:])


def _blocks(x: Array, groups: Groups) -> Array:
    """Strided groups as a view (blocks, group size, stride, ...); a block is `stride` groups."""
    stride = groups.stride
    assert stride is not None
    blocks = groups.group_count // stride
    return x.reshape(blocks, groups.group_size, stride, *x.shape[1:])


def by_replica(pieces: Array | list[Array], groups: Groups) -> Array:
    """Pieces (groups, group size, ...), an array or one for each group, copied to (R, ...)."""
    if on_device(pieces[0]):
        every = np.concatenate(list(pieces))
        place = np.argsort([replica for group in groups.members for replica in group])
        return rows(every, place.tolist())
    out = empty(pieces[0], (groups.size, *pieces[0].shape[1:]))
    copy(
        [
            (out[replica, ...], part[place, ...])
            for group, part in zip(groups.members, pieces, strict=True)
            for place, replica in enumerate(group)
        ]
    )
    return out


def spread(values: Array | list[Array], operand: Operand, groups: Groups) -> Result:
    """Give every replica its group's value: shared, read-only, in a list or if there is one."""
    if operand.listed:
        shared = [read_only(value) for value in values]
        return Result([shared[g] for g in groups.assignment], True)
    if groups.group_count == 1:
        value = read_only(values[0])
        return Result(np.broadcast_to(value, (groups.size, *value.shape)), True)
    if on_device(values[0]):
        each = np.stack(values) if isinstance(values, list) else values
        return Result(rows(each, groups.assignment), True)
    out = empty(values[0], (groups.size, *values[0].shape))
    copy([(out[replica, ...], values[g]) for replica, g in enumerate(groups.assignment)])
    return Result(out, True)


def fold_all(operand: Operand, places: Any = None, **how: Any) -> Array:
    """The fold over all replicas: (*batch, *s)."""
    return kernels(operand.array).fold(
        operand.values,
        batch_ndim=operand.batch_ndim,
        places=places_of(operand, places, how),
        **how,
    )


def fold_groups(
    operand: Operand, groups: Groups, places: Any = None, *, mean: bool = False, **how: Any
) -> Array | list[Array]:
    """The fold of each group, as (groups, *batch, *s) or a list of arrays (*batch, *s).

    ``mean`` makes the divisor each group's own size.
    """
    places = places_of(operand, places, how) * groups.group_count
    if not operand.listed and groups.strided:
        return _fold_strided(operand, groups, places, mean, how)
    if not operand.listed and groups.even and on_device(operand.values):
        members = by_group(operand.values, groups).swapaxes(0, 1)
        return _fold_batched(members, 1, operand, groups, places, mean, how)
    fold = kernels(operand.array).fold
    return [
        fold(
            operand.members(group),
            divisor=len(group) if mean else None,
            batch_ndim=operand.batch_ndim,
            places=places + g,
            **how,
        )
        for g, group in enumerate(groups.members)
    ]


def _fold_strided(
    operand: Operand, groups: Groups, places: Any, mean: bool, how: dict[str, Any]
) -> Array:
    """One fold for all groups: they become two more batch axes of a view."""
    members = _blocks(operand.stacked(), groups).swapaxes(0, 1)
    return _fold_batched(members, 2, operand, groups, places, mean, how)


def _fold_batched(
    members: Array,
    axes: int,
    operand: Operand,
    groups: Groups,
    places: Any,
    mean: bool,
    how: dict[str, Any],
) -> Array:
    """Members (group size, *groups, *batch, *s), of which the groups have some `axes`."""
    ones = [1] * operand.batch_ndim
    group = np.arange(groups.group_count).reshape(*members.shape[1 : 1 + axes], *ones)
    folded = kernels(members).fold(
        members,
        divisor=groups.group_size if mean else None,
        batch_ndim=operand.batch_ndim + axes,
        places=places + group,
        **how,
    )
    return folded.reshape(groups.group_count, *folded.shape[axes:])


def places_of(operand: Operand, places: Any, how: dict[str, Any]) -> Any:
    """The linear index over the other mapped axes, for each batch entry; asked for or counted."""
    if how.get("rounding") != "stochastic":
        return 0  # no random bits are drawn
    if places is None:
        return np.arange(np.prod(operand.batch_shape, dtype=np.int64)).reshape(operand.batch_shape)
    return np.asarray(places)
