"""Rearrangements across instances: each instance asks for those values, or parts of values, that
its own members receive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ...groups import Groups
from ...runtime.engines import Buffer
from .. import gather, permute
from ..exchange import cut, exchanged_axes, merge
from ..kernels import copy, empty
from ..operand import (
    Array,
    GroupsLike,
    Operand,
    Result,
    Values,
    as_groups,
    read_only,
    replica_index,
)
from .spread import LONG_MESSAGE, Numbers, Spread, contiguous, fetch, rows_of


def all_gather(
    spread: Spread,
    x: Values,
    *,
    axis: int = 0,
    tiled: bool = False,
    groups: GroupsLike = None,
    batch_ndim: int = 0,
) -> Result:
    """As on one instance, with the members of the groups that have a member here."""
    operand = Operand(x, batch_ndim, "all_gather")
    operand.axis(axis, "axis", operand.ndim + (not tiled))
    partition = as_groups(groups, spread.size, "all_gather")
    needs = _group_mates(spread, partition)
    gathered = fetch(spread, rows_of(spread, operand), needs, operand[0])
    how: dict[str, Any] = {"axis": axis, "tiled": tiled, "batch_ndim": batch_ndim}
    if partition is None:
        return Result(read_only(gather.all_gather(gathered, **how).value), False)
    # Which of the fetched members each group's are, and where this instance's own are.
    place = {number: place for place, number in enumerate(needs[spread.own].tolist())}
    among = Groups(
        tuple(
            tuple(place[member] for member in group)
            for group in partition.members
            if group[0] in place
        )
    )
    own = [place[number] for number in spread.mine.tolist()]
    return Result(gather.all_gather(gathered, groups=among, **how).value[own], True)


def psum_scatter_transpose(
    spread: Spread, ct: Values, *, scatter_dimension: int = 0, **options: Any
) -> Result:
    return all_gather(spread, ct, axis=scatter_dimension, **options)


def _group_mates(spread: Spread, groups: Groups | None) -> list[Numbers]:
    """For each instance the members of all groups that have a member there."""
    if groups is None:
        return [np.arange(spread.size)] * spread.world.instances
    assignment = np.asarray(groups.assignment)
    return [np.flatnonzero(np.isin(assignment, assignment[members])) for members in spread.held]


def pbroadcast(spread: Spread, x: Values, source: int, *, batch_ndim: int = 0) -> Result:
    operand = Operand(x, batch_ndim, "pbroadcast")
    source = replica_index(source, spread.size, "pbroadcast: source")
    needs = [np.array([source])] * spread.world.instances
    return Result(
        read_only(fetch(spread, rows_of(spread, operand), needs, operand[0])[0, ...]), False
    )


def ppermute(
    spread: Spread, x: Values, perm: Iterable[Sequence[int]], *, batch_ndim: int = 0
) -> Result:
    sources = permute.sources_of(perm, spread.size)
    return _send(spread, Operand(x, batch_ndim, "ppermute"), sources)


def ppermute_transpose(
    spread: Spread, ct: Values, perm: Iterable[Sequence[int]], *, batch_ndim: int = 0
) -> Result:
    sources = permute.sources_of(perm, spread.size)
    back = {source: destination for destination, source in sources.items()}
    return _send(spread, Operand(ct, batch_ndim, "ppermute"), back)


def pshuffle(spread: Spread, x: Values, perm: Iterable[int], *, batch_ndim: int = 0) -> Result:
    sources = dict(enumerate(permute.permutation_of(perm, spread.size)))
    return _send(spread, Operand(x, batch_ndim, "pshuffle"), sources)


def pshuffle_transpose(
    spread: Spread, ct: Values, perm: Iterable[int], *, batch_ndim: int = 0
) -> Result:
    order = permute.permutation_of(perm, spread.size)
    inverse = {source: destination for destination, source in enumerate(order)}
    return _send(spread, Operand(ct, batch_ndim, "pshuffle"), inverse)


def _send(spread: Spread, operand: Operand, sources: dict[int, int]) -> Result:
    """Give each destination (key) its source's value, and the others zeros."""
    needs = [
        np.unique([sources[member] for member in members.tolist() if member in sources])
        for members in spread.held
    ]
    needs = [numbers.astype(np.intp) for numbers in needs]
    like = operand[0]
    arrived = fetch(spread, rows_of(spread, operand), needs, like)
    asked, own = needs[spread.own], spread.mine.tolist()
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


def pgather(
    spread: Spread, src: Values, idx: Values, *, batch_ndim: int = 0, varies: Sequence[bool]
) -> Result:
    """Indices that differ between replicas are small: all instances see all of them."""
    source = Operand(src, batch_ndim, "pgather")
    chosen = Operand(idx, batch_ndim, "pgather (idx)")
    gather.check_indices(source, chosen, spread.size)
    numbers = chosen.stacked() if varies[1] else chosen[0]
    indices = numbers.astype(np.intp)
    if varies[1]:
        everyone = [np.arange(spread.size)] * spread.world.instances
        rows = {int(n): indices[place] for place, n in enumerate(spread.mine.tolist())}
        table = fetch(spread, rows, everyone, indices[0])
        needs = [np.unique(table[members]) for members in spread.held]
    else:
        needs = [np.unique(indices)] * spread.world.instances
    found = fetch(spread, rows_of(spread, source), needs, source[0])
    among = np.searchsorted(needs[spread.own], indices)
    rows_found = Operand(found, batch_ndim, "pgather") if len(found) else source
    if not len(found):  # no index at all
        among = indices
    values = gather.choose(rows_found, among, mapped=varies[1])
    return Result(values, varies[1])


def all_to_all(
    spread: Spread,
    x: Values,
    split_axis: int,
    concat_axis: int,
    *,
    tiled: bool = False,
    groups: GroupsLike = None,
    batch_ndim: int = 0,
) -> Result:
    operand = Operand(x, batch_ndim, "all_to_all")
    return _all_to_all(spread, operand, split_axis, concat_axis, tiled, groups)


def all_to_all_transpose(
    spread: Spread, ct: Values, split_axis: int, concat_axis: int, **options: Any
) -> Result:
    return all_to_all(spread, ct, concat_axis, split_axis, **options)


def pswapaxes(
    spread: Spread, x: Values, axis: int, *, groups: GroupsLike = None, batch_ndim: int = 0
) -> Result:
    return _all_to_all(spread, Operand(x, batch_ndim, "pswapaxes"), axis, axis, False, groups)


def _all_to_all(
    spread: Spread,
    operand: Operand,
    split_axis: int,
    concat_axis: int,
    tiled: bool,
    groups: GroupsLike,
) -> Result:
    """Pieces go to the instances of their receivers, and are put in place as they arrive."""
    partition = as_groups(groups, spread.size, operand.collective) or Groups.all(spread.size)
    count = partition.group_size
    split, concat = exchanged_axes(operand, split_axis, concat_axis, tiled, count)
    if operand[0].nbytes < count * LONG_MESSAGE:
        return _all_to_all_small(spread, operand, partition, split, concat, tiled)
    groups_of = [np.asarray(group) for group in partition.members]
    mates = [groups_of[group] for group in partition.assignment]
    like = operand[0]

    def pieces_of(member: int) -> Array:
        """(group, *piece), a view."""
        value = operand[int(spread.position[member])]
        return np.moveaxis(cut(value, split, count) if tiled else value, split, 0)

    own = {member: pieces_of(member) for member in spread.mine.tolist()}
    piece = next(iter(own.values()))[0, ...]
    shape = (*piece.shape[:concat], count, *piece.shape[concat:])
    out = empty(like, (len(spread.mine), *shape))
    order = {member: place for group in partition.members for place, member in enumerate(group)}

    def between(sender: int, receiver: int) -> Iterator[tuple[int, int]]:
        """The pieces that one instance sends to another: (member, place of the receiver)."""
        for member in spread.held[sender].tolist():
            for place in np.flatnonzero(spread.owner[mates[member]] == receiver).tolist():
                yield member, place

    def target(member: int, place: int) -> Array:
        """Where what ``member`` sends to that place of its group, which is here, is to be."""
        receiver = int(spread.position[mates[member][place]])
        return out[receiver][(*(slice(None),) * concat, order[member], ...)]

    sends: list[Buffer] = []
    receives: list[Buffer] = []
    arrived: list[tuple[Array, Array]] = []
    for other in spread.others:
        outgoing = [own[member][place, ...] for member, place in between(spread.own, other)]
        targets = [target(member, place) for member, place in between(other, spread.own)]
        sends += [(contiguous(part), other) for part in outgoing]
        buffers = [t if t.flags.c_contiguous else np.empty_like(t, order="C") for t in targets]
        receives += [(buffer, other) for buffer in buffers]
        arrived += [(t, b) for t, b in zip(targets, buffers, strict=True) if t is not b]
    pending = spread.exchange(sends, receives)
    here = between(spread.own, spread.own)
    copy([(target(member, place), own[member][place, ...]) for member, place in here])
    pending.wait()
    copy(arrived)
    return Result(merge(out, concat + 1) if tiled else out, True)


def _all_to_all_small(
    spread: Spread, operand: Operand, partition: Groups, split: int, concat: int, tiled: bool
) -> Result:
    """The same for pieces that are small, and may be many: all for one instance in one message."""
    count = partition.group_size
    whole = operand.stacked()
    pieces = np.moveaxis(cut(whole, split + 1, count) if tiled else whole, split + 1, 1)
    shape = pieces.shape[2:]
    out = empty(operand[0], (len(spread.mine), *shape[:concat], count, *shape[concat:]))
    into = np.moveaxis(out, concat + 1, 1)  # (receiver, place of the sender, *piece)
    groups = np.asarray(partition.members)
    place = np.empty(spread.size, np.intp)  # of each member in its group
    place[groups] = np.arange(count)
    assignment = np.asarray(partition.assignment)

    def between(sender: int, receiver: int) -> tuple[Numbers, Numbers, Numbers]:
        """What one instance sends to another: senders, receivers, and these' places."""
        members = spread.held[sender]
        receivers = groups[assignment[members]]
        rows, places = np.nonzero(spread.owner[receivers] == receiver)
        return members[rows], receivers[rows, places], places

    sends: list[Buffer] = []
    arrivals = []
    for other in spread.others:
        senders, _, places = between(spread.own, other)
        sends.append((np.ascontiguousarray(pieces[spread.position[senders], places]), other))
        senders, receivers, _ = between(other, spread.own)
        buffer = empty(operand[0], (len(senders), *shape))
        arrivals.append((other, buffer, spread.position[receivers], place[senders]))
    pending = spread.exchange(sends, [(buffer, other) for other, buffer, *_ in arrivals])
    senders, receivers, places = between(spread.own, spread.own)
    at = spread.position
    into[at[receivers], place[senders]] = pieces[at[senders], places]
    pending.wait()
    for _, buffer, rows, columns in arrivals:
        into[rows, columns] = buffer
    return Result(merge(out, concat + 1) if tiled else out, True)
