"""psum_scatter across instances: each instance receives the pieces of all contributions that its
members keep, and folds those alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...groups import Groups
from ...libraries import as_bits, call_on_bits, contiguous
from ..fold import Fold
from ..kernels import FoldPart, FoldSpec, copy, empty, replace_fields, run_fold
from ..operand import Array, Operand, Result
from .layout import LONG_MESSAGE, Layout


def sum_scatter(
    layout: Layout, operand: Operand, partition: Groups | None, fold: Fold, axis: int, tiled: bool
) -> Result:
    """The slices of each group's sum, cut along `axis`, for the local members."""
    groups = partition or Groups.all(layout.size)
    count = groups.group_size
    spec, offsets = fold.spec, fold.offsets(operand)
    batch, shape = operand.batch_shape, operand.shape
    each = shape[axis] // count
    piece = (*shape[:axis], each, *shape[axis + 1 :]) if tiled else shape[:axis] + shape[axis + 1 :]
    # A piece as (batch entries, outer, inner elements); a value has count of them behind outer.
    outer, inner = math.prod(shape[:axis]), each * math.prod(shape[axis + 1 :])
    entries = math.prod(batch)
    values = {
        member: call_on_bits(np.reshape, operand[place], (entries, outer, count, inner))
        for place, member in enumerate(layout.local.tolist())
    }
    like = operand[0]
    out = empty(like, (len(layout.local), *batch, *piece))
    alone = spec.order == "ring" or _by_index(spec)  # each receiver's fold
    if partition is None and like.nbytes < count * LONG_MESSAGE and not alone:
        here = len(layout.local)
        whole = operand.stacked()
        whole = call_on_bits(np.reshape, whole, (here, entries, outer, count, inner))
        folded = _fold_packed(layout, whole, spec)
        copy([(out.reshape(here, entries, outer, inner), np.moveaxis(folded, 2, 0))])
        return Result(out, True)
    rows = out.reshape(len(layout.local), entries, outer, inner)
    contributions = _exchange(layout, groups, values, (entries, outer, inner), like)
    for number, members in enumerate(groups.members):
        for position, member in enumerate(members):
            if layout.instance_of[member] != layout.instance:
                continue
            kept = _fold(
                [contributions[sender, position] for sender in members],
                position,
                count,
                spec,
                fold.call,
                offsets * groups.group_count + number,
            )
            copy([(rows[layout.position[member]], kept)])
    return Result(out, True)


def _fold_packed(layout: Layout, values: Array, spec: FoldSpec) -> Array:
    """The folds (batch entries, outer, receiver here, inner) of pieces that are small, and may be
    many: all for one instance in one message, and all in one fold."""
    _, entries, outer, _, inner = values.shape
    shape = (entries, outer, len(layout.local), inner)
    bits = as_bits(values)
    everyone = empty(bits, (layout.size, *shape))
    arrived = [empty(bits, (len(layout.members_of[other]), *shape)) for other in layout.others]
    sends = [
        (contiguous(bits[:, :, :, layout.members_of[other]]), other) for other in layout.others
    ]
    pending = layout.exchange(sends, list(zip(arrived, layout.others, strict=True)))
    everyone[layout.local] = bits[:, :, :, layout.local]
    pending.wait()
    for other, pieces in zip(layout.others, arrived, strict=True):
        everyone[layout.members_of[other]] = pieces
    return run_fold(spec, everyone.view(values.dtype))


def _exchange(
    layout: Layout,
    groups: Groups,
    values: dict[int, Array],
    shape: tuple[int, ...],
    like: Array,
) -> dict[tuple[int, int], Array]:
    """The pieces (sender, position of the receiver in its group) that are folded here."""
    pieces: dict[tuple[int, int], Array] = {}
    sends, receives = [], []
    for other in range(layout.world.instances):
        outgoing = _wanted(layout, groups, layout.instance, other)
        if other == layout.instance:
            pieces.update({(s, p): values[s][:, :, p, :] for s, p in outgoing})
            continue
        buffer = empty(like, (len(outgoing), *shape))
        for target, (sender, position) in zip(buffer, outgoing, strict=True):
            copy([(target, values[sender][:, :, position, :])])
        sends.append((buffer, other))
        incoming = _wanted(layout, groups, other, layout.instance)
        buffer = empty(like, (len(incoming), *shape))
        receives.append((buffer, other))
        pieces.update(zip(incoming, buffer, strict=True))
    layout.exchange(sends, receives).wait()
    return pieces


def _wanted(layout: Layout, groups: Groups, sender: int, receiver: int) -> list[tuple[int, int]]:
    """The pieces that one instance sends to another: (member, receiver's position in its group)."""
    return [
        (member, position)
        for member in layout.members_of[sender].tolist()
        for position, other in enumerate(groups.members[groups.assignment[member]])
        if layout.instance_of[other] == receiver
    ]


def _by_index(spec: FoldSpec) -> bool:
    """Whether the fold of an element depends on its index in the value."""
    return spec.rounding == "stochastic" or not isinstance(spec.order, str)


def _fold(
    pieces: list[Array], position: int, count: int, spec: FoldSpec, call: int, offsets: Any
) -> Array:
    """The fold of one receiver's piece (batch entries, outer, inner) of all contributions."""
    if spec.order == "ring":  # the ring's blocks are the pieces: this one begins at its receiver
        spec = replace_fields(spec, order="linear")
        pieces = pieces[position:] + pieces[:position]
    entries, outer, inner = pieces[0].shape
    if not _by_index(spec):
        return run_fold(spec, pieces)
    # Random bits, and a schedule's blocks, go by the index in the value before it is scattered.
    total = outer * count * inner
    result = empty(pieces[0])
    where = np.broadcast_to(np.asarray(offsets).reshape(-1), (entries,))
    for row in range(outer):
        first = (row * count + position) * inner
        folded = run_fold(
            spec,
            [piece[:, row] for piece in pieces],
            batch_ndim=1,
            call=call,
            batch_offset=where,
            part=FoldPart(window=(first, total)),
        )
        copy([(result[:, row], folded)])
    return result
