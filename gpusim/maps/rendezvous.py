"""Collectives of threads: the replicas meet, and the last to arrive computes for all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..collectives import Result, dispatch
from ..collectives.dispatch import Leaf
from ..collectives.distributed.layout import all_gather_bytes
from ..libraries import call_on_bits, copy_array, owner
from .agreement import agreement
from .axis_environment import Axes, AxisEntry, union
from .contribution import Contribution
from .lockstep import (
    Stacked,
    batch_axes,
    batch_offset,
    deliver,
    group_size,
    is_scalar,
    layout_of,
    prepare,
    sharded_axis,
)
from .mapped_array.align import expand, sizes
from .mapped_array.array import Array, read_only
from .scheduler import current_replica
from .streams import DeviceRendezvous, arrive

#: How a number that another instance has sent is read.
NUMBERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "complex": complex}


def meet(contribution: Contribution) -> list[list[Any]]:
    """This replica's results for each leaf, when all replicas have called the same."""
    # In the replica's own thread, with its slot.
    thread = current_replica()
    # Before the replica is counted as there: the event is behind all that it has queued, and the
    # one that computes waits for it on the GPU. The host waits for nothing.
    arrival = None if thread.stream_slot is None else arrive(thread.stream_slot)
    if arrival is not None:
        contribution = replace(contribution, arrival=arrival)
    # The last replica's choice counts; all have the same, as it is the call's.
    compute = _compute_on_streams if thread.call.streams else compute_for_all
    # The one place where a replica of pmap waits for others. `compute` runs in the thread of the
    # last to arrive, with its slot and without the scheduler's lock; the others hold neither.
    return thread.meet(
        contribution.threaded_axes,
        contribution.enclosing,
        contribution.terms(),
        contribution,
        compute,
    )


def _compute_on_streams(contributions: list[Contribution]) -> list[list[list[Any]]]:
    """The same for replicas on GPUs: their values meet on one of these."""
    if all(contribution.arrival is None for contribution in contributions):
        return compute_for_all(contributions)
    # Results are allocated on the rendezvous's stream, which waits for all streams that hold one:
    # see `streams`.
    rendezvous = DeviceRendezvous([contribution.arrival for contribution in contributions])
    with rendezvous.held():
        results = compute_for_all(_on_one_gpu(contributions, rendezvous))
        flat = [
            (value, replica)
            for replica, leaves in enumerate(results)
            for leaf in leaves
            for value in leaf
        ]
        values = iter(rendezvous.hand_out(flat))
        return [[[next(values) for _ in leaf] for leaf in leaves] for leaves in results]


def _on_one_gpu(
    contributions: list[Contribution], rendezvous: DeviceRendezvous
) -> list[Contribution]:
    """The contributions with all operands on the rendezvous's GPU."""
    found = [[list(operands) for operands in each.leaves] for each in contributions]
    for number, operands in enumerate(contributions[0].leaves):
        for k, operand in enumerate(operands):
            if isinstance(operand, tuple):  # else a Python number
                data = rendezvous.gather([each.leaves[number][k][0] for each in contributions])
                for leaves, each, data_there in zip(found, contributions, data, strict=True):
                    leaves[number][k] = data_there, each.leaves[number][k][1]
    return [replace(c, leaves=leaves) for c, leaves in zip(contributions, found, strict=True)]


def compute_for_all(contributions: list[Contribution]) -> list[list[list[Any]]]:
    """Each replica's results for each leaf, from all replicas' contributions in row-major order of
    their threaded axes."""
    # Terms are equal on all, so the first one's call stands for all. Its axis entries do not: each
    # replica binds its own, which `_canonical` renames.
    first = contributions[0]
    # A generator: one leaf's operands are brought together while those of others are as they were.
    leaves = (_prepare(contributions, number) for number in range(len(first.leaves)))
    per_leaf = dispatch.run(first.call, leaves, agreement(first))
    return [[results[replica] for results in per_leaf] for replica in range(len(contributions))]


def _prepare(contributions: list[Contribution], number: int) -> Leaf:
    """A leaf for the dispatcher, which finishes as the results of each replica."""
    first = contributions[0]
    leaves = [each.leaves[number] for each in contributions]
    scalars = is_scalar(leaves[0][0])
    if scalars:
        values = [operands[0] for operands in leaves]
        # Replicas are free to pass different numbers. So they are looked at, here and on all
        # instances, before it is known whether there is anything to fold.
        shared = sharded_axis(first.threaded_axes) is not None
        # On several instances this is an exchange, which all of them have to take part in: what
        # decides about it (`shared`) is a term of the call, and never a value.
        everyone = _numbers_of_all(first, values) if shared else values
        if all(value == everyone[0] for value in everyone):
            size = group_size(first.call, first.entries)
            count = len(contributions)
            return Leaf(
                (everyone[0],),
                scalar_size=size,
                finish=lambda results: [[results[0].value]] * count,
            )
        if shared and len(first.threaded_axes) == len(first.names):
            return _prepare_numbers(first, everyone)
        leaves = [[(np.asarray(value), ())] for value in values]
    # By operand, then by replica. From here on all entries are the first replica's.
    columns = [
        [_canonical(operands[k], first.enclosing) for operands in leaves]
        for k in range(len(leaves[0]))
    ]
    largest = max(data.size for column in columns for data, _ in column)
    # A group of threads alone is folded as a list of arrays, where they are: kernels take their
    # addresses, and nothing is stacked.
    lists = len(first.threaded_axes) == len(first.names)
    leaf = (_prepare_lists if lists else _prepare_stacked)(first, columns)

    def finish(results: list[Result]) -> list[list[Any]]:
        assert leaf.finish is not None
        return [
            [_hand_over(data, axes, each, scalars, largest) for data, axes in values]
            for each, values in zip(contributions, leaf.finish(results), strict=True)
        ]

    return leaf._replace(finish=finish)


def _canonical(operand: Stacked, enclosing: Axes) -> Stacked:
    """The operand with its axes named by the first replica's entries (replicas bind their own)."""
    data, axes = operand
    return data, tuple(enclosing[entry.depth] for entry in axes)


def _hand_over(
    data: Array, axes: Axes, contribution: Contribution, scalar: bool, largest: int
) -> Any:
    """A result as the replica's own code sees it: its own copy, which it may write.

    Results of more elements than the `largest` operand (all_gather's) are not copied for every
    replica: they are read-only.
    """
    if scalar and not axes:
        return data.item()
    # The receiver's own entries: a value under another replica's would be refused as of an ended
    # map.
    own = tuple(contribution.enclosing[entry.depth] for entry in axes)
    # An all_gather's result for R replicas would be copied R times: R times R values.
    if isinstance(data, np.ndarray) and data.size > largest:
        data = read_only(data)
    elif isinstance(data, np.ndarray):
        data = copy_array(data)
    return deliver(data, own, contribution.enclosing)


# Python numbers


def _numbers_of_all(first: Contribution, values: list[Any]) -> list[Any]:
    """The Python numbers of all replicas, row-major in the order of the names of threaded axes."""
    entries = tuple(entry for entry in first.entries if entry.index is not None)
    layout = layout_of(entries, first.enclosing)
    order = _tuple_order(first.threaded_axes, entries)
    # As text, since float and int of any size have to arrive as they are; nothing is unpickled.
    text = json.dumps([(type(values[r]).__name__, repr(values[r])) for r in order])
    everyone: list[Any] = [None] * layout.size
    # Held for the exchange alone. The fold itself, if there is one, takes the channel again.
    with layout.channel():
        texts = all_gather_bytes(layout, text.encode())
    for members, other in zip(layout.members_of, texts, strict=True):
        for member, (kind, number) in zip(members.tolist(), json.loads(other), strict=True):
            everyone[member] = NUMBERS[kind](number)
    return everyone


def _prepare_numbers(first: Contribution, everyone: list[Any]) -> Leaf:
    """The Python numbers of all instances: each computes the whole result."""
    threaded_axes, group = first.threaded_axes, tuple(first.entries)
    layout = layout_of(group, first.enclosing)

    def finish(results: list[Result]) -> list[list[Any]]:
        (result,) = results
        out: list[list[Any]] = [[]] * math.prod(sizes(threaded_axes))
        for position, replica in enumerate(_tuple_order(threaded_axes, group)):
            own = result.value[layout.local[position]] if result.mapped else result.value
            out[replica] = [own.item()]
        return out

    return Leaf(
        ([np.asarray(value) for value in everyone],),
        batch_offset=batch_offset(first.call, group, (), first.enclosing),
        finish=finish,
        axes=(group, ()),
    )


# The group is the threads: the definition takes their arrays as a list.


def _prepare_lists(first: Contribution, columns: list[list[Stacked]]) -> Leaf:
    call, threaded_axes, group = first.call, first.threaded_axes, tuple(first.entries)
    axes: Axes = ()
    for column in columns:
        for _, own in column:
            axes = union(axes, own)
    batch = batch_axes(call, axes, group, first.enclosing)
    order = _tuple_order(threaded_axes, group)
    members = [[expand(*column[r], batch) for r in order] for column in columns]

    def finish(results: list[Result]) -> list[list[Stacked]]:
        # A result may be a view of what a replica has sent (ppermute, all_gather). The sender goes
        # on and may write it, or a receiver may: then each gets a copy. Arguments are read-only,
        # and need none.
        changeable = _changeable_roots(members)
        common = [None if r.mapped else _detach(r.value, changeable) for r in results]
        out: list[list[Stacked]] = [[] for _ in order]
        for position, replica in enumerate(order):
            for result, value in zip(results, common, strict=True):
                if result.mapped:
                    value = _detach(result.value[position], changeable)
                out[replica].append((value, batch))
        return out

    shared = sharded_axis(group) is not None
    return Leaf(
        tuple(members),
        len(batch),
        batch_offset(call, group, batch, first.enclosing),
        layout_of(group, first.enclosing) if shared else None,
        (True,) * len(members) if shared else None,
        finish=finish,
        axes=(group, batch),
    )


def _tuple_order(threaded_axes: Axes, entries: Sequence[AxisEntry]) -> list[int]:
    """For each position in the group (row-major in the names' order) the replica, in order of
    depth."""
    numbers = np.arange(math.prod(sizes(threaded_axes))).reshape(sizes(threaded_axes))
    return numbers.transpose([threaded_axes.index(entry) for entry in entries]).ravel().tolist()


def _changeable_roots(members: list[list[Array]]) -> set[int]:
    roots = set()
    for column in members:
        for array in column:
            root = owner(array)
            if not isinstance(root, np.ndarray) or root.flags.writeable:  # a GPU's always are
                roots.add(id(root))
    return roots


def _detach(value: Array, changeable: set[int]) -> Array:
    """A copy, if the replica that sent the value could still change it."""
    return copy_array(value) if changeable and id(owner(value)) in changeable else value


# Threads and lockstep axes in one group: stack the threads, run in lockstep, take apart.


def _prepare_stacked(first: Contribution, columns: list[list[Stacked]]) -> Leaf:
    threaded_axes = first.threaded_axes
    operands = [_stack_threads(column, threaded_axes) for column in columns]
    leaf = prepare(first.call, first.names, first.entries, operands, first.enclosing)

    def finish(results: list[Result]) -> list[list[Stacked]]:
        assert leaf.finish is not None
        # Of the order in which replicas are counted: row-major over the threaded axes, outermost
        # first.
        stacked, out = leaf.finish(results), []
        for index in np.ndindex(*sizes(threaded_axes)):
            where = dict(zip(threaded_axes, index, strict=True))
            out.append([_take(data, axes, where) for data, axes in stacked])
        return out

    return leaf._replace(finish=finish)


def _stack_threads(column: list[Stacked], threaded_axes: Axes) -> Stacked:
    axes: Axes = ()
    for _, own in column:
        axes = union(axes, own)
    stacked = call_on_bits(np.stack, [expand(*operand, axes) for operand in column])
    stacked = stacked.reshape(sizes(threaded_axes) + stacked.shape[1:])
    mixed = (*threaded_axes, *axes)
    # Mapped axes of an array are always in order of depth, outermost first: the lockstep code
    # relies on it.
    order = sorted(range(len(mixed)), key=lambda place: mixed[place].depth)
    stacked = stacked.transpose(*order, *range(len(order), stacked.ndim))
    return stacked, tuple(mixed[place] for place in order)


def _take(data: Array, axes: Axes, where: dict[AxisEntry, int]) -> Stacked:
    index = tuple(where.get(entry, slice(None)) for entry in axes)
    return data[(*index, ...)], tuple(entry for entry in axes if entry not in where)
