"""ragged_all_to_all across instances: all see the whole plan, which is small, and exchange rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...groups import Groups
from ..kernels import empty, kernels
from ..operand import Array, Operand
from ..ragged_plan import (
    RECEIVER,
    ROWS,
    SENDER,
    SENT_FROM,
    WRITTEN_TO,
    check_cotangent,
    ragged_plan,
    rest_of_outputs,
)
from ..ragged_rows import clear_received, copy_of, entries_of, new_like, send_back, zeros_like
from .layout import Layout, fetch, rows_of

Segments = NDArray[np.int64]


class RowPlan(NamedTuple):
    """The copies of this instance: segments of slices, in the plan's order.

    Senders and receivers that are here are counted as here, (place among the instance's members) *
    entries + entry; those that are not are -1.
    """

    segments: Segments
    sender_at: NDArray[np.intp]  # the instance of each segment's sender
    receiver_at: NDArray[np.intp]

    def between(self, sender: int, receiver: int) -> Segments:
        """The segments from one instance to another."""
        return self.segments[(self.sender_at == sender) & (self.receiver_at == receiver)]


def exchange_rows(
    layout: Layout,
    sources: Operand,
    outputs: Operand,
    indices: tuple[Operand, ...],
    groups: Groups | None,
) -> Any:
    """The outputs of the local members with the rows that they receive."""
    batch_ndim = sources.batch_ndim
    plan = _plan(layout, sources, outputs, indices, groups)
    own = layout.instance
    ragged_copy = kernels(sources.array).ragged_copy
    read = entries_of(sources.values, sources)
    row = sources[0][(0,) * batch_ndim].shape[1:]
    outgoing = {
        other: _packed(read, plan.between(own, other), SENDER, SENT_FROM, row)
        for other in layout.others
    }
    incoming = {
        other: empty(sources[0], (_rows(plan.between(other, own)), *row)) for other in layout.others
    }
    pending = layout.exchange(
        [(buffer, other) for other, buffer in outgoing.items()],
        [(buffer, other) for other, buffer in incoming.items()],
    )
    written = new_like(outputs)
    received = entries_of(written, outputs)
    arriving = plan.segments[plan.receiver_at == own]
    ragged_copy(entries_of(outputs.values, outputs), received, rest_of_outputs(arriving, outputs))
    ragged_copy(read, received, plan.between(own, own))
    pending.wait()
    for other, buffer in incoming.items():
        segments = plan.between(other, own)
        segments[:, SENDER], segments[:, SENT_FROM] = 0, _starts(segments)
        ragged_copy(buffer[None], received, segments)
    return written


def send_rows_back(
    layout: Layout,
    cotangents: Operand,
    sources: Operand,
    outputs: Operand,
    indices: tuple[Operand, ...],
    groups: Groups | None,
) -> tuple[Any, Any]:
    """The cotangents of the local operands and outputs."""
    batch_ndim = sources.batch_ndim
    check_cotangent(cotangents, outputs)
    plan = _plan(layout, sources, outputs, indices, groups)
    own = layout.instance
    read = entries_of(cotangents.values, cotangents)
    row = cotangents[0][(0,) * batch_ndim].shape[1:]
    outgoing = {
        other: _packed(read, plan.between(other, own), RECEIVER, WRITTEN_TO, row)
        for other in layout.others
    }
    incoming = {
        other: empty(cotangents[0], (_rows(plan.between(own, other)), *row))
        for other in layout.others
    }
    pending = layout.exchange(
        [(buffer, other) for other, buffer in outgoing.items()],
        [(buffer, other) for other, buffer in incoming.items()],
    )
    operand_ct, output_ct = zeros_like(cotangents, sources), copy_of(cotangents)
    arriving = plan.segments[plan.receiver_at == own]
    if len(arriving):
        clear_received(entries_of(output_ct, outputs), arriving, cotangents)
    pending.wait()
    # Rows that come back from elsewhere lie in the buffers, as if those were receivers too.
    sent, at = plan.segments[plan.sender_at == own], plan.receiver_at[plan.sender_at == own]
    returning = list(read)
    for other, buffer in incoming.items():
        chosen = at == other
        sent[chosen, RECEIVER] = len(returning)
        sent[chosen, WRITTEN_TO] = _starts(sent[chosen])
        returning.append(buffer)
    if len(sent):
        send_back(returning, entries_of(operand_ct, sources), sent, cotangents)
    return operand_ct, output_ct


def _plan(
    layout: Layout,
    operand: Operand,
    output: Operand,
    indices: tuple[Operand, ...],
    groups: Groups | None,
) -> RowPlan:
    """The plan of all instances, checked; and who of it is here."""

    def everywhere(one: Operand) -> Operand:
        """As many operands of this kind as there are members; only the kind matters."""
        whole = np.broadcast_to(one[0], (layout.size, *one[0].shape))
        return Operand(whole, one.batch_ndim, one.collective)

    tables = []
    for given in indices:
        everyone = [np.arange(layout.size)] * layout.world.instances
        table = fetch(layout, rows_of(layout, given), everyone, given[0])
        tables.append(Operand(table, operand.batch_ndim, given.collective))
    segments = ragged_plan(everywhere(operand), everywhere(output), tuple(tables), groups)
    entries = int(np.prod(operand.batch_shape, dtype=np.int64))
    ends = []
    for column in (SENDER, RECEIVER):
        member, entry = np.divmod(segments[:, column], entries)
        at = layout.instance_of[member]
        here = layout.position[member] * entries + entry
        segments[:, column] = np.where(at == layout.instance, here, -1)
        ends.append(at)
    return RowPlan(segments, *ends)


def _rows(segments: Segments) -> int:
    return int(segments[:, ROWS].sum())


def _starts(segments: Segments) -> Segments:
    """The start of each segment in a buffer that holds them consecutively."""
    ends: Segments = np.cumsum(segments[:, ROWS])
    return ends - segments[:, ROWS]


def _packed(
    arrays: Any, segments: Segments, replica: int, start: int, row: tuple[int, ...]
) -> Array:
    """The rows of segments, one behind the other."""
    buffer = empty(arrays[0], (_rows(segments), *row))
    there = np.zeros_like(segments)
    there[:, SENDER], there[:, SENT_FROM] = segments[:, replica], segments[:, start]
    there[:, WRITTEN_TO], there[:, ROWS] = _starts(segments), segments[:, ROWS]
    kernels(arrays[0]).ragged_copy(arrays, buffer[None], there)
    return buffer
