"""psum_scatter across instances: each instance receives the pieces of all contributions that its
members keep, and folds those alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...groups import Groups
from ..kernels import empty, kernels
from ..operand import Array, Operand, Result
from ..scatter import scattered_axis
from .spread import LONG_MESSAGE, Spread


def psum_scatter(
    spread: Spread,
    operand: Operand,
    partition: Groups | None,
    scatter_dimension: int,
    tiled: bool,
    how: dict[str, Any],
    places: Any,
) -> Result:
    groups = partition or Groups.all(spread.size)
    count = groups.group_size
    axis = scattered_axis(operand, scatter_dimension, tiled, count)
    batch, shape = operand.batch_shape, operand.shape
    each = shape[axis] // count
    piece = (*shape[:axis], each, *shape[axis + 1 :]) if tiled else shape[:axis] + shape[axis + 1 :]
    # A piece as (batch entries, outer, inner elements); a value has count of them behind outer.
    outer, inner = math.prod(shape[:axis]), each * math.prod(shape[axis + 1 :])
    entries = math.prod(batch)
    values = {
        member: operand[place].reshape(entries, outer, count, inner)
        for place, member in enumerate(spread.mine.tolist())
    }
    like = operand[0]
    out = empty(like, (len(spread.mine), *batch, *piece))
    alone = how["order"] == "ring" or _by_index(how)  # each receiver's fold
    if partition is None and like.nbytes < count * LONG_MESSAGE and not alone:
        whole = operand.stacked().reshape(-1, entries, outer, count, inner)
        folded = _fold_small(spread, whole, how)
        out.reshape(-1, entries, outer, inner)[...] = np.moveaxis(folded, 2, 0)
        return Result(out, True)
    rows = out.reshape(len(spread.mine), entries, outer, inner)
    contributions = _exchange(spread, groups, values, (entries, outer, inner), like)
    for number, members in enumerate(groups.members):
        for position, member in enumerate(members):
            if spread.owner[member] != spread.own:
                continue
            arguments = {**how, "places": places * groups.group_count + number}
            rows[spread.position[member]] = _fold(
                [contributions[sender, position] for sender in members], position, count, arguments
            )
    return Result(out, True)


def _fold_small(spread: Spread, values: Array, how: dict[str, Any]) -> Array:
    """The folds (batch entries, outer, receiver here, inner) of pieces that are small, and may be
    many: all for one instance in one message, and all in one fold."""
    _, entries, outer, _, inner = values.shape
    shape = (entries, outer, len(spread.mine), inner)
    everyone = empty(values, (spread.size, *shape))
    arrived = [empty(values, (len(spread.held[other]), *shape)) for other in spread.others]
    sends = [
        (np.ascontiguousarray(values[:, :, :, spread.held[other]]), other)
        for other in spread.others
    ]
    pending = spread.exchange(sends, list(zip(arrived, spread.others, strict=True)))
    everyone[spread.mine] = values[:, :, :, spread.mine]
    pending.wait()
    for other, pieces in zip(spread.others, arrived, strict=True):
        everyone[spread.held[other]] = pieces
    return kernels(values).fold(everyone, **{**how, "places": 0})


def _exchange(
    spread: Spread,
    groups: Groups,
    values: dict[int, Array],
    shape: tuple[int, ...],
    like: Array,
) -> dict[tuple[int, int], Array]:
    """The pieces (sender, position of the receiver in its group) that are folded here."""
    pieces: dict[tuple[int, int], Array] = {}
    sends, receives = [], []
    for other in range(spread.world.instances):
        outgoing = _wanted(spread, groups, spread.own, other)
        if other == spread.own:
            pieces.update({(s, p): values[s][:, :, p, :] for s, p in outgoing})
            continue
        buffer = empty(like, (len(outgoing), *shape))
        for target, (sender, position) in zip(buffer, outgoing, strict=True):
            target[...] = values[sender][:, :, position, :]
        sends.append((buffer, other))
        incoming = _wanted(spread, groups, other, spread.own)
        buffer = empty(like, (len(incoming), *shape))
        receives.append((buffer, other))
        pieces.update(zip(incoming, buffer, strict=True))
    spread.exchange(sends, receives).wait()
    return pieces


def _wanted(spread: Spread, groups: Groups, sender: int, receiver: int) -> list[tuple[int, int]]:
    """What one instance sends to another: (member, position of the receiver in its group)."""
    return [
        (member, position)
        for member in spread.held[sender].tolist()
        for position, other in enumerate(groups.members[groups.assignment[member]])
        if spread.owner[other] == receiver
    ]


def _by_index(how: dict[str, Any]) -> bool:
    """Whether the fold of an element depends on where in its value it is."""
    return how["rounding"] == "stochastic" or not isinstance(how["order"], str)


def _fold(pieces: list[Array], position: int, count: int, how: dict[str, Any]) -> Array:
    """The fold of one receiver's piece (batch entries, outer, inner) of all contributions."""
    fold = kernels(pieces[0]).fold
    if how["order"] == "ring":  # the ring's blocks are the pieces: this one begins at its receiver
        how = {**how, "order": "linear"}
        pieces = pieces[position:] + pieces[:position]
    entries, outer, inner = pieces[0].shape
    if not _by_index(how):
        return fold(pieces, **{**how, "places": 0})
    # Random bits, and a schedule's blocks, go by the index in the value that is not scattered.
    total = outer * count * inner
    result = empty(pieces[0])
    where = np.broadcast_to(np.asarray(how["places"]).reshape(-1), (entries,))
    for row in range(outer):
        first = (row * count + position) * inner
        result[:, row] = fold(
            [piece[:, row] for piece in pieces],
            batch_ndim=1,
            window=(first, total),
            **{**how, "places": where},
        )
    return result
