"""Collectives in lockstep: operands stacked over any mapped axes become stacked arrays with the
collective's axes in front, and results come back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from ..collectives import Result, dispatch
from ..collectives.dispatch import Leaf, Resolved, run_leaf
from ..collectives.distributed.layout import Layout
from ..collectives.joining import join, joins, small_together, split
from ..libraries import call_on_bits, copy_array, owner, reshaped_view
from ..runtime.world import CHANNELS
from .axis_environment import Axes, AxisEntry, AxisName, union
from .mapped_array.align import expand, sizes
from .mapped_array.array import Array, wrap_array
from .mapped_array.memory import is_writable
from .names import is_positional

Stacked = tuple[Array, Axes]  # data whose leading axes are the given ones


def is_scalar(value: Any) -> bool:
    """Whether a value is a Python number; psum of one is size times the number.

    bool is not: it is summed as int32, as an array.
    """
    return type(value) in (int, float, complex)


def run_lockstep(
    call: Resolved,
    names: tuple[AxisName, ...],
    entries: Sequence[AxisEntry],
    leaves: Sequence[Sequence[Any]],
    enclosing: Axes,
    agreement: AbstractContextManager[Any] | None = None,
) -> list[list[Any]]:
    """Run a collective on leaves whose operands are stacked, or a Python number.

    **Returns** for each leaf its results, as the code around sees them.
    """

    if agreement is not None:
        with agreement:
            return run_lockstep(call, names, entries, leaves, enclosing)
    if len(leaves) > 1 and _may_join(call, names, entries):
        buckets = _buckets(leaves)
        if len(buckets) < len(leaves):
            return _run_joined(call, names, entries, leaves, enclosing, buckets)
    delivered = []
    for number, operands in enumerate(leaves, call.number):
        values = run_leaf(call, prepare(call, names, entries, operands, enclosing), number)
        for place, value in enumerate(values):
            if type(value) is tuple:
                data, axes = value
                if _is_shared(data, operands):
                    data = copy_array(data)
                values[place] = deliver(data, axes, enclosing)
        delivered.append(values)
    return delivered


def _is_shared(data: Array, operands: Sequence[Any]) -> bool:
    """Whether a result has memory of an operand, or cannot be written: then it is copied."""
    if isinstance(data, np.generic):
        return False
    if not is_writable(data):
        return True
    root = data if data.base is None else owner(data)
    for operand in operands:
        if type(operand) is tuple and owner(operand[0]) is root:
            return True
    return False


def _may_join(call: Resolved, names: tuple[AxisName, ...], entries: Sequence[AxisEntry]) -> bool:
    """Whether small leaves may be one value: for axes of this process, and none of the operand."""
    if call.reduction is None or not call.collective.replicated or len(entries) < len(names):
        return False
    if dispatch.record_call is not None or sharded_axis(entries) is not None:
        return False
    return joins(call.reduction)


def _buckets(leaves: Sequence[Sequence[Any]]) -> list[list[int]]:
    """The places of leaves in groups, each to be one value; Python numbers are alone."""
    return small_together(leaf[0] if type(leaf[0]) is tuple else (leaf[0], None) for leaf in leaves)


def _run_joined(
    call: Resolved,
    names: tuple[AxisName, ...],
    entries: Sequence[AxisEntry],
    leaves: Sequence[Sequence[Any]],
    enclosing: Axes,
    buckets: list[list[int]],
) -> list[list[Any]]:
    """As `run_lockstep`, with the leaves of each bucket as one value."""
    delivered: list[list[Any]] = [[]] * len(leaves)
    for places in buckets:
        first = leaves[places[0]]
        if len(places) == 1:
            (delivered[places[0]],) = run_lockstep(call, names, entries, [first], enclosing)
            continue
        axes: Axes = first[0][1]
        arrays = [leaves[place][0][0] for place in places]
        whole = [(join(arrays, len(axes)), axes)]
        leaf = prepare(call, names, entries, whole, enclosing)
        ((data, axes_left),) = run_leaf(call, leaf, call.number)
        if not is_writable(data):
            data = copy_array(data)
        parts = split(data, [x.shape[len(axes) :] for x in arrays])
        for place, part in zip(places, parts, strict=True):
            delivered[place] = [deliver(part, axes_left, enclosing)]
    return delivered


def scalar_leaf(value: Any, call: Resolved, entries: Sequence[AxisEntry]) -> Leaf:
    """A Python number that all replicas hold."""
    size = group_size(call, entries)
    return Leaf((value,), scalar_size=size, finish=lambda results: [results[0].value])


def deliver(data: Array, axes: Axes, enclosing: Axes) -> Any:
    """A result as the code around sees it: wrapped under vmap, else a plain array."""
    for entry in enclosing:
        if entry.index is None:
            return wrap_array(data, axes)
    return np.asarray(data) if isinstance(data, np.generic) else data


def group_size(call: Resolved, entries: Sequence[AxisEntry]) -> int:
    """The number of members of a group."""
    if call.groups is not None:
        return call.groups.group_size
    return math.prod(entry.total for entry in entries)


def prepare(
    call: Resolved,
    names: tuple[AxisName, ...],
    entries: Sequence[AxisEntry],
    operands: Sequence[Any],
    enclosing: Axes,
) -> Leaf:
    """A leaf for the dispatcher, whose results become stacked data again."""
    if type(operands[0]) is not tuple:
        return scalar_leaf(operands[0], call, entries)
    if len(entries) < len(names):
        (operand,) = operands  # collectives of several take no positional axes
        operand, entries = _expose_positional(call, names, entries, operand, len(enclosing))
        operands = (operand,)
    group = tuple(entries)
    axes: Axes = operands[0][1]
    for _, own in operands[1:]:
        axes = union(axes, own)
    shared = sharded_axis(group)
    if shared is not None and shared not in axes:
        return _prepare_equal(call, names, group, operands, enclosing, shared)
    batch: Axes = ()
    offset: Any = 0
    if axes != group or is_stochastic(call):
        batch = batch_axes(call, axes, group, enclosing)
        offset = batch_offset(call, group, batch, enclosing)
    members = []
    for operand in operands:
        members.append(_members(operand, group, batch))
    layout = varies = None
    if shared is not None:
        layout = layout_of(group, enclosing)
        varies = _vary_along(shared, operands)
    finish = partial(_unstack, group, batch)
    return Leaf(members, len(batch), offset, layout, varies, None, finish, (group, batch))


def _vary_along(axis: AxisEntry, operands: Sequence[Stacked]) -> tuple[bool, ...]:
    return tuple(axis in axes for _, axes in operands)


def _prepare_equal(
    call: Resolved,
    names: tuple[AxisName, ...],
    group: Axes,
    operands: Sequence[Stacked],
    enclosing: Axes,
    shared: AxisEntry,
) -> Leaf:
    """Operands that do not vary along the axis that instances share: each instance has them for
    all replicas, computes everything, and keeps its part."""
    whole = AxisEntry(shared.name, shared.total, shared.depth)

    def replaced(axes: Axes, old: AxisEntry, new: AxisEntry) -> Axes:
        return tuple(new if entry is old else entry for entry in axes)

    leaf = prepare(
        call, names, replaced(group, shared, whole), operands, replaced(enclosing, shared, whole)
    )

    def own_part(results: list[Result]) -> list[Stacked]:
        found = []
        assert leaf.finish is not None
        for data, axes in leaf.finish(results):
            if whole in axes:
                before = [slice(None)] * axes.index(whole)
                data = data[(*before, slice(shared.offset, shared.offset + shared.size))]
            found.append((data, replaced(axes, whole, shared)))
        return found

    return leaf._replace(finish=own_part)


# Stacking


def _members(operand: Stacked, group: Axes, batch: Axes) -> Array | list[Array]:
    """The operand as (R, *batch, *s), or a list of R views where that would copy."""
    data, axes = operand
    if axes == group and not batch:
        return data if len(group) == 1 else _merge_axes(data, group)
    stacked_axes = sorted((*group, *batch), key=lambda entry: entry.depth)
    full = expand(data, axes, tuple(stacked_axes))
    order = [*map(stacked_axes.index, (*group, *batch))]
    full = full.transpose(*order, *range(len(order), full.ndim))
    return full if len(group) == 1 else _merge_axes(full, group)


def _merge_axes(full: Array, group: Axes) -> Array | list[Array]:
    """The leading axes of a group as one, or a list where that would copy."""
    count = math.prod(sizes(group))
    rest = full.shape[len(group) :]
    try:
        return reshaped_view(full, (count, *rest))
    except ValueError:
        return [full[(*place, ...)] for place in np.ndindex(*sizes(group))]


def _unstack(group: Axes, batch: Axes, results: list[Result]) -> list[Stacked]:
    """Results as stacked data, their mapped axes in their order of depth."""
    found: list[Stacked] = []
    for value, mapped in results:
        if not mapped:
            found.append((value, batch))
            continue
        if isinstance(value, list):
            value = call_on_bits(np.stack, value)
        axes = (*group, *batch)
        if len(axes) > 1:
            value = value.reshape(sizes(group) + value.shape[1:])
            outermost_first = tuple(sorted(axes, key=lambda entry: entry.depth))
            if axes != outermost_first:
                order = [*map(axes.index, outermost_first)]
                value = value.transpose(*order, *range(len(order), value.ndim))
                axes = outermost_first
        found.append((value, axes))
    return found


# The other mapped axes


def is_stochastic(call: Resolved) -> bool:
    """Whether random bits are drawn."""
    return call.reduction is not None and call.reduction.draws


def batch_axes(call: Resolved, axes: Axes, group: Axes, enclosing: Axes) -> Axes:
    """The other mapped axes that a collective runs along.

    Stochastic rounding draws other bits for each place, so operands are broadcast over all axes
    there.
    """
    if is_stochastic(call):
        axes = union(axes, tuple(entry for entry in enclosing if entry.index is None))
    return tuple(entry for entry in axes if entry not in group)


def batch_offset(call: Resolved, group: Axes, batch: Axes, enclosing: Axes) -> Any:
    """The linear index over all mapped axes but the collective's own, outermost first, along
    `batch`."""
    if not is_stochastic(call):
        return 0
    index: Any = 0
    for entry in enclosing:
        if entry in group:
            continue
        if entry.index is not None and entry not in batch:
            index = index * entry.total + entry.offset + entry.index
        elif entry in batch:
            shape = [entry.size if entry is other else 1 for other in batch]
            here = np.arange(entry.offset, entry.offset + entry.size)
            index = index * entry.total + here.reshape(shape)
        else:
            index = index * entry.total
    return index


# Instances


def sharded_axis(entries: Sequence[AxisEntry]) -> AxisEntry | None:
    """The axis that instances share, if it is one of these."""
    for entry in entries:
        if entry.sharding is not None:
            return entry
    return None


def layout_of(group: Sequence[AxisEntry], enclosing: Axes) -> Layout:
    """Where the group's members are, in the order of the axis names, over the instances."""
    (axis,) = (number for number, entry in enumerate(group) if entry.sharding is not None)
    sharding = group[axis].sharding
    assert sharding is not None
    totals = tuple(entry.total for entry in group)
    return Layout(sharding.world, totals, axis, sharding.counts, channel(enclosing, group))


def channel(enclosing: Axes, group: Sequence[AxisEntry]) -> int:
    """A number for the threads that meet: different ones for those that meet at the same time."""
    number = 0
    for entry in enclosing:
        if entry.index is not None and entry not in group:
            number = number * (entry.size + 1) + entry.index + 1
    return number % CHANNELS


# Positional axes are mapped axes for the time of one collective.


def _expose_positional(
    call: Resolved,
    names: tuple[AxisName, ...],
    bound_entries: Sequence[AxisEntry],
    operand: Stacked,
    depth: int,
) -> tuple[Stacked, tuple[AxisEntry, ...]]:
    """The operand with its positional axes leading as axes of their own, and the axes of all
    names."""
    data, axes = operand
    ndim = data.ndim - len(axes)
    identity = call.collective.identity
    named = iter(bound_entries)
    entries: list[AxisEntry] = []
    sources: list[int] = []
    for name in names:
        if not is_positional(name):
            entries.append(next(named))
            continue
        source = int(name) + len(axes)  # type: ignore[call-overload]  # an integer, by is_positional
        if not len(axes) <= source < data.ndim:
            raise ValueError(
                f"axis_name {names!r} has the positional axis {name}, but the array of shape "
                f"{data.shape[len(axes) :]} has axes 0 to {ndim - 1}"
            )
        if data.shape[source] == 0 and identity is not None:
            shape = (*data.shape[:source], 1, *data.shape[source + 1 :])
            data = np.full_like(data, identity(data.dtype), shape=shape)
        entries.append(AxisEntry(None, data.shape[source], depth + len(sources)))
        axes = (*axes, entries[-1])
        sources.append(source)
    if sources:
        start = len(axes) - len(sources)
        data = np.moveaxis(data, sources, range(start, len(axes)))
    return (data, axes), tuple(entries)
