"""Rearrangements across instances: each instance asks for the values, or parts of values, that its
own members receive."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...groups import Groups
from ...libraries import contiguous, to_host
from ...runtime.engines import Buffer
from ..kernels import copy, empty
from ..operand import Array, Operand, Result
from .layout import LONG_MESSAGE, Layout, Numbers, fetch, rows_of


def fetch_all(layout: Layout, x: Operand) -> Array:
    """The values of all members: (members, *batch, *s)."""
    everyone = [np.arange(layout.size)] * layout.world.instances
    return fetch(layout, rows_of(layout, x), everyone, x[0])


def fetch_groups(
    layout: Layout, x: Operand, groups: Groups | None
) -> tuple[Array, Groups | None, list[int]]:
    r"""The values of all groups that have a member here.

    **Returns**: the values (fetched, \*batch, \*s), the groups among them, and which of them are
    this instance's own.
    """
    if groups is None:
        return fetch_all(layout, x), None, []
    assignment = np.asarray(groups.assignment)
    needs = [
        np.flatnonzero(np.isin(assignment, assignment[members])) for members in layout.members_of
    ]
    place = {number: place for place, number in enumerate(needs[layout.instance].tolist())}
    members = (group for group in groups.members if group[0] in place)
    among = Groups(tuple(tuple(place[member] for member in group) for group in members))
    own = [place[number] for number in layout.local.tolist()]
    return fetch(layout, rows_of(layout, x), needs, x[0]), among, own


def fetch_one(layout: Layout, x: Operand, source: int) -> Array:
    """The value of one member, on all instances."""
    needs = [np.array([source])] * layout.world.instances
    return fetch(layout, rows_of(layout, x), needs, x[0])[0, ...]


def fetch_chosen(layout: Layout, x: Operand, idx: Operand) -> tuple[Array | None, Array]:
    """The values of the members that indices name, and the indices among these.

    The values are None where there is no index. Indices that differ between replicas are small:
    all instances see all of them.
    """
    indices = to_host(idx.stacked() if idx.varies else idx[0]).astype(np.intp)
    if idx.varies:
        everyone = [np.arange(layout.size)] * layout.world.instances
        rows = {int(n): indices[place] for place, n in enumerate(layout.local.tolist())}
        table = fetch(layout, rows, everyone, indices[0])
        needs = [np.unique(table[members]) for members in layout.members_of]
    else:
        needs = [np.unique(indices)] * layout.world.instances
    found = fetch(layout, rows_of(layout, x), needs, x[0])
    if not len(found):
        return None, indices
    return found, np.searchsorted(needs[layout.instance], indices)


def send(layout: Layout, x: Operand, sources: dict[int, int]) -> Result:
    """Give each destination (key) its source's value, and the others zeros."""
    needs = [
        np.unique([sources[member] for member in members.tolist() if member in sources])
        for members in layout.members_of
    ]
    needs = [numbers.astype(np.intp) for numbers in needs]
    like = x[0]
    arrived = fetch(layout, rows_of(layout, x), needs, like)
    asked, own = needs[layout.instance], layout.local.tolist()
    from_whom = [sources.get(member) for member in own]
    if list(asked) == from_whom:  # in the order of their destinations already
        return Result(arrived, True)
    place = {source: place for place, source in enumerate(asked.tolist())}
    out = empty(like, (len(own), *like.shape))
    nothing = np.zeros_like(like, shape=())
    copy(
        [
            (out[number, ...], nothing if source is None else arrived[place[source], ...])
            for number, source in enumerate(from_whom)
        ]
    )
    return Result(out, True)


def cut(x: Array, axis: int, count: int) -> Array:
    """One axis as two, (count, length of a part): always a view."""
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


def all_to_all(
    layout: Layout, operand: Operand, partition: Groups, split: int, concat: int, tiled: bool
) -> Result:
    """Pieces go to the instances of their receivers, and are put in place as they arrive."""
    count = partition.group_size
    if operand[0].nbytes < count * LONG_MESSAGE:
        return _all_to_all_packed(layout, operand, partition, split, concat, tiled)
    groups_of = [np.asarray(group) for group in partition.members]
    mates = [groups_of[group] for group in partition.assignment]
    like = operand[0]

    def pieces_of(member: int) -> Array:
        """(group, *piece), a view."""
        value = operand[int(layout.position[member])]
        return np.moveaxis(cut(value, split, count) if tiled else value, split, 0)

    own = {member: pieces_of(member) for member in layout.local.tolist()}
    piece = next(iter(own.values()))[0, ...]
    shape = (*piece.shape[:concat], count, *piece.shape[concat:])
    out = empty(like, (len(layout.local), *shape))
    order = {member: place for group in partition.members for place, member in enumerate(group)}

    def between(sender: int, receiver: int) -> Iterator[tuple[int, int]]:
        """The pieces that one instance sends to another: (member, place of the receiver)."""
        for member in layout.members_of[sender].tolist():
            for place in np.flatnonzero(layout.instance_of[mates[member]] == receiver).tolist():
                yield member, place

    def target(member: int, place: int) -> Array:
        """The destination of the piece that `member` sends to that position of its group, here."""
        receiver = int(layout.position[mates[member][place]])
        return out[receiver][(*(slice(None),) * concat, order[member], ...)]

    sends: list[Buffer] = []
    receives: list[Buffer] = []
    arrived: list[tuple[Array, Array]] = []
    for other in layout.others:
        outgoing = [own[member][place, ...] for member, place in between(layout.instance, other)]
        targets = [target(member, place) for member, place in between(other, layout.instance)]
        sends += [(contiguous(part), other) for part in outgoing]
        buffers = [t if t.flags.c_contiguous else empty(t) for t in targets]
        receives += [(buffer, other) for buffer in buffers]
        arrived += [(t, b) for t, b in zip(targets, buffers, strict=True) if t is not b]
    pending = layout.exchange(sends, receives)
    here = between(layout.instance, layout.instance)
    copy([(target(member, place), own[member][place, ...]) for member, place in here])
    pending.wait()
    copy(arrived)
    return Result(merge(out, concat + 1) if tiled else out, True)


def _all_to_all_packed(
    layout: Layout, operand: Operand, partition: Groups, split: int, concat: int, tiled: bool
) -> Result:
    """The same for pieces that are small, and may be many: all for one instance in one message."""
    count = partition.group_size
    whole = operand.stacked()
    pieces = np.moveaxis(cut(whole, split + 1, count) if tiled else whole, split + 1, 1)
    shape = pieces.shape[2:]
    out = empty(operand[0], (len(layout.local), *shape[:concat], count, *shape[concat:]))
    into = np.moveaxis(out, concat + 1, 1)  # (receiver, place of the sender, *piece)
    groups = np.asarray(partition.members)
    place = np.empty(layout.size, np.intp)  # of each member in its group
    place[groups] = np.arange(count)
    assignment = np.asarray(partition.assignment)

    def between(sender: int, receiver: int) -> tuple[Numbers, Numbers, Numbers]:
        """The pieces from one instance to another: senders, receivers, and their positions."""
        members = layout.members_of[sender]
        receivers = groups[assignment[members]]
        rows, places = np.nonzero(layout.instance_of[receivers] == receiver)
        return members[rows], receivers[rows, places], places

    sends: list[Buffer] = []
    arrivals = []
    for other in layout.others:
        senders, _, places = between(layout.instance, other)
        sends.append((contiguous(pieces[layout.position[senders], places]), other))
        senders, receivers, _ = between(other, layout.instance)
        buffer = empty(operand[0], (len(senders), *shape))
        arrivals.append((other, buffer, layout.position[receivers], place[senders]))
    pending = layout.exchange(sends, [(buffer, other) for other, buffer, *_ in arrivals])
    senders, receivers, places = between(layout.instance, layout.instance)
    at = layout.position
    into[at[receivers], place[senders]] = pieces[at[senders], places]
    pending.wait()
    for _, buffer, rows, columns in arrivals:
        into[rows, columns] = buffer
    return Result(merge(out, concat + 1) if tiled else out, True)
