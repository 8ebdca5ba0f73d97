"""Collectives of threads: the replicas meet, and the last to arrive computes for all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..collectives import Result, dispatch
from ..collectives.dispatch import Leaf, Resolved, describe
from ..collectives.distributed.layout import all_gather_bytes
from .agreement import agreement, kind_of
from .arguments import root_of
from .frames import Axes, AxisName, Frame, union
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
from .mapped_array.align import common_axes, lead_full, sizes
from .mapped_array.array import Array, wrap
from .scheduler import current_task
from .streams import Arrival, Rendezvous, arrive

#: How a number that another instance has sent is read.
NUMBERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "complex": complex}

#: Makes of a leaf's results those of each replica.
Share = Callable[[list[Result]], list[list[Any]]]


@dataclass(frozen=True)
class Contribution:
    """One replica's part in a rendezvous.

    **Attributes**: the call, the names of its axes and their frames, the operands of each leaf, all
    frames around, the structure of the tree, `line`, where it is called, if instances share an
    axis, and `arrival`, of a replica on a GPU.
    """

    call: Resolved
    names: tuple[AxisName, ...]
    frames: list[Frame]
    leaves: list[list[Any]]
    enclosing: Axes
    structure: Any
    line: str = ""
    arrival: Arrival | None = None

    @property
    def threads(self) -> Axes:
        """The threaded frames that the collective spans, outermost first."""
        return tuple(f for f in self.enclosing if f.index is not None and f in self.frames)

    def terms(self) -> dict[str, Any]:
        """All that must be the same on all replicas, by its name in error messages."""
        return describe(
            self.call,
            [kind_of(operand) for operands in self.leaves for operand in operands],
            axis_name=self.names,
            **{
                "axes around": tuple((frame.name, frame.total) for frame in self.enclosing),
                "tree": self.structure,
            },
        )


def meet(contribution: Contribution) -> list[list[Any]]:
    """This replica's results for each leaf, when all replicas have called the same."""
    task = current_task()
    arrival = None if task.lane is None else arrive(task.lane)
    if arrival is not None:
        contribution = replace(contribution, arrival=arrival)
    compute = _compute_on_streams if task.run.streams else compute_for_all
    found: list[list[Any]] = task.meet(
        contribution.threads,
        contribution.enclosing,
        contribution.terms(),
        contribution,
        compute,
    )
    if arrival is not None:
        arrival.depart()
    return found


def _compute_on_streams(contributions: list[Contribution]) -> list[list[list[Any]]]:
    """The same for replicas on GPUs: their values meet on one of these."""
    if all(contribution.arrival is None for contribution in contributions):
        return compute_for_all(contributions)
    meeting = Rendezvous([contribution.arrival for contribution in contributions])
    with meeting.held():
        results = compute_for_all(_on_one_gpu(contributions, meeting))
        flat = [
            (value, replica)
            for replica, leaves in enumerate(results)
            for leaf in leaves
            for value in leaf
        ]
        values = iter(meeting.hand_out(flat))
        return [[[next(values) for _ in leaf] for leaf in leaves] for leaves in results]


def _on_one_gpu(contributions: list[Contribution], meeting: Rendezvous) -> list[Contribution]:
    """The contributions with all operands on the meeting's GPU."""
    found = [[list(operands) for operands in each.leaves] for each in contributions]
    for number, operands in enumerate(contributions[0].leaves):
        for k, operand in enumerate(operands):
            if isinstance(operand, tuple):  # else a Python number
                data = meeting.gather([each.leaves[number][k][0] for each in contributions])
                for leaves, each, moved in zip(found, contributions, data, strict=True):
                    leaves[number][k] = moved, each.leaves[number][k][1]
    return [replace(c, leaves=leaves) for c, leaves in zip(contributions, found, strict=True)]


def compute_for_all(contributions: list[Contribution]) -> list[list[list[Any]]]:
    """Each replica's results for each leaf, from all replicas' contributions in row-major order of
    their threaded frames."""
    first = contributions[0]
    shares: list[Share] = []

    def prepared(number: int) -> Leaf:
        leaf, share = _prepare(contributions, number)
        shares.append(share)
        return leaf

    leaves = map(prepared, range(len(first.leaves)))
    found = dispatch.run(first.call, leaves, agreement(first))
    per_leaf = [share(results) for results, share in zip(found, shares, strict=True)]
    return [[results[replica] for results in per_leaf] for replica in range(len(contributions))]


def _prepare(contributions: list[Contribution], number: int) -> tuple[Leaf, Share]:
    """A leaf for the dispatcher, and how its results become each replica's."""
    first = contributions[0]
    leaves = [each.leaves[number] for each in contributions]
    scalars = is_scalar(leaves[0][0])
    if scalars:
        values = [operands[0] for operands in leaves]
        shared = sharded_axis(first.threads) is not None
        everyone = _numbers_of_all(first, values) if shared else values
        if all(value == everyone[0] for value in everyone):
            leaf = Leaf((everyone[0],), scalar_size=group_size(first.call, first.frames))
            return leaf, lambda results: [[results[0].value]] * len(contributions)
        if shared and len(first.threads) == len(first.names):
            return _prepare_numbers(first, everyone)
        leaves = [[(np.asarray(value), ())] for value in values]
    columns = [
        [_canonical(operands[k], first.enclosing) for operands in leaves]
        for k in range(len(leaves[0]))
    ]
    lists = len(first.threads) == len(first.names)
    leaf, taken_apart = (_prepare_lists if lists else _prepare_stacked)(first, columns)

    def share(results: list[Result]) -> list[list[Any]]:
        return [
            [_hand_over(data, axes, each, scalars) for data, axes in values]
            for each, values in zip(contributions, taken_apart(results), strict=True)
        ]

    return leaf, share


def _canonical(operand: Stacked, enclosing: Axes) -> Stacked:
    """The operand with its axes named by the first replica's frames (replicas bind their own)."""
    data, axes = operand
    return data, tuple(enclosing[frame.depth] for frame in axes)


def _hand_over(data: Array, axes: Axes, contribution: Contribution, scalar: bool) -> Any:
    """A result as the replica's own code sees it."""
    if scalar and not axes:
        return data.item()
    own = tuple(contribution.enclosing[frame.depth] for frame in axes)
    return deliver(data, own, contribution.enclosing)


# Python numbers


def _numbers_of_all(first: Contribution, values: list[Any]) -> list[Any]:
    """The Python numbers of all replicas, row-major in the order of the names of threaded axes."""
    frames = tuple(frame for frame in first.frames if frame.index is not None)
    layout = layout_of(frames, first.enclosing)
    order = _tuple_order(first.threads, frames)
    text = json.dumps([(type(values[r]).__name__, repr(values[r])) for r in order])
    everyone: list[Any] = [None] * layout.size
    with layout.channel():
        texts = all_gather_bytes(layout, text.encode())
    for members, other in zip(layout.members_of, texts, strict=True):
        for member, (kind, number) in zip(members.tolist(), json.loads(other), strict=True):
            everyone[member] = NUMBERS[kind](number)
    return everyone


def _prepare_numbers(first: Contribution, everyone: list[Any]) -> tuple[Leaf, Share]:
    """The Python numbers of all instances: each computes the whole result."""
    threads, group = first.threads, tuple(first.frames)
    layout = layout_of(group, first.enclosing)
    leaf = Leaf(
        ([np.asarray(value) for value in everyone],),
        batch_offset=batch_offset(first.call, group, (), first.enclosing),
    )

    def share(results: list[Result]) -> list[list[Any]]:
        (result,) = results
        out: list[list[Any]] = [[]] * math.prod(sizes(threads))
        for position, replica in enumerate(_tuple_order(threads, group)):
            own = result.value[layout.local[position]] if result.mapped else result.value
            out[replica] = [own.item()]
        return out

    return leaf, share


# The group is the threads: the definition takes their arrays as a list.


def _prepare_lists(
    first: Contribution, columns: list[list[Stacked]]
) -> tuple[Leaf, Callable[[list[Result]], list[list[Stacked]]]]:
    call, threads, group = first.call, first.threads, tuple(first.frames)
    axes: Axes = ()
    for column in columns:
        for _, own in column:
            axes = union(axes, own)
    batch = batch_axes(call, axes, group, first.enclosing)
    order = _tuple_order(threads, group)
    members = [[lead_full(wrap(*column[r]), batch) for r in order] for column in columns]
    shared = sharded_axis(group) is not None
    leaf = Leaf(
        tuple(members),
        len(batch),
        batch_offset(call, group, batch, first.enclosing),
        layout_of(group, first.enclosing) if shared else None,
        (True,) * len(members) if shared else None,
    )

    def taken_apart(results: list[Result]) -> list[list[Stacked]]:
        changeable = _changeable_roots(members)
        common = [None if r.mapped else _detach(r.value, changeable) for r in results]
        out: list[list[Stacked]] = [[] for _ in order]
        for position, replica in enumerate(order):
            for result, value in zip(results, common, strict=True):
                if result.mapped:
                    value = _detach(result.value[position], changeable)
                out[replica].append((value, batch))
        return out

    return leaf, taken_apart


def _tuple_order(threads: Axes, frames: Sequence[Frame]) -> list[int]:
    """For each position in the group (row-major in the names' order) the replica, in order of
    depth."""
    numbers = np.arange(math.prod(sizes(threads))).reshape(sizes(threads))
    return numbers.transpose([threads.index(frame) for frame in frames]).ravel().tolist()


def _changeable_roots(members: list[list[Array]]) -> set[int]:
    roots = set()
    for column in members:
        for array in column:
            root = root_of(array)
            if not isinstance(root, np.ndarray) or root.flags.writeable:  # a GPU's always are
                roots.add(id(root))
    return roots


def _detach(value: Array, changeable: set[int]) -> Array:
    """A copy, if the replica that sent the value could still change it."""
    return value.copy() if changeable and id(root_of(value)) in changeable else value


# Threads and lockstep axes in one group: stack the threads, run in lockstep, take apart.


def _prepare_stacked(
    first: Contribution, columns: list[list[Stacked]]
) -> tuple[Leaf, Callable[[list[Result]], list[list[Stacked]]]]:
    threads = first.threads
    operands = [_stack_threads(column, threads) for column in columns]
    leaf, finish = prepare(first.call, first.names, first.frames, operands, first.enclosing)

    def taken_apart(results: list[Result]) -> list[list[Stacked]]:
        stacked, out = finish(results), []
        for index in np.ndindex(*sizes(threads)):
            where = dict(zip(threads, index, strict=True))
            out.append([_take(data, axes, where) for data, axes in stacked])
        return out

    return leaf, taken_apart


def _stack_threads(column: list[Stacked], threads: Axes) -> Stacked:
    axes = common_axes(wrap(*operand) for operand in column)
    stacked = np.stack([lead_full(wrap(*operand), axes) for operand in column])
    stacked = stacked.reshape(sizes(threads) + stacked.shape[1:])
    mixed = (*threads, *axes)
    order = sorted(range(len(mixed)), key=lambda place: mixed[place].depth)
    stacked = stacked.transpose(*order, *range(len(order), stacked.ndim))
    return stacked, tuple(mixed[place] for place in order)


def _take(data: Array, axes: Axes, where: dict[Frame, int]) -> Stacked:
    index = tuple(where.get(frame, slice(None)) for frame in axes)
    return data[(*index, ...)], tuple(frame for frame in axes if frame not in where)
