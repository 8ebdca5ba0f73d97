"""ragged_all_to_all: segments of rows, of any lengths, from every replica to every other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import libraries
from .kernels import copy, empty, kernels
from .linear import linear
from .operand import Array, GroupsLike, Operand, Result, Values
from .ragged_plan import (
    RECEIVER,
    ROWS,
    SENDER,
    SENT_FROM,
    WRITTEN_TO,
    overlapping,
    ragged_plan,
    rest_of_outputs,
)


@linear
def ragged_all_to_all(
    operand: Values,
    output: Values,
    input_offsets: Values,
    send_sizes: Values,
    output_offsets: Values,
    recv_sizes: Values,
    *,
    groups: GroupsLike = None,
    batch_ndim: int = 0,
) -> Result:
    """Each replica sends K slices of its rows; what it receives is written into its ``output``.

    With n replicas in a group, slice i of a sender goes to the member at position i // (K / n).

    **Arguments**, all stacked (R, *batch, ...) or lists of R arrays: ``operand`` (N, *row) and
    ``output`` (M, *row) of one dtype; four integer arrays (K,), K a multiple of n.
    ``input_offsets`` and ``send_sizes`` say which rows of the operand each slice holds,
    ``output_offsets`` where it goes in its *receiver's* output, and ``recv_sizes`` how many
    rows are received: all_to_all of the senders' sizes. Groups have one size.

    **Returns** new arrays (M, *row), mapped: the outputs with the received rows written.

    **Raises** ValueError, before anything is written: integers of another type, shapes and lengths
    that do not fit, numbers that are negative or end past an array, sizes that disagree with their
    receiver's, and slices that overlap on a receiver. Messages name replica, slice and numbers.

    Two replicas; each keeps its first rows and swaps the rest:

    >>> rows = np.array([[1, 2, 2], [3, 4, 0]])
    >>> ragged_all_to_all(
    ...     rows,
    ...     np.zeros((2, 4), int),
    ...     input_offsets=np.array([[0, 1], [0, 1]]),
    ...     send_sizes=np.array([[1, 2], [1, 1]]),
    ...     output_offsets=np.array([[0, 0], [1, 2]]),
    ...     recv_sizes=np.array([[1, 1], [2, 1]]),
    ... )
    Result(value=array([[1, 3, 0, 0], [2, 2, 4, 0]]), mapped=True)
    """
    sources = Operand(operand, batch_ndim, "ragged_all_to_all (operand)")
    outputs = Operand(output, batch_ndim, "ragged_all_to_all (output)")
    indices = (input_offsets, send_sizes, output_offsets, recv_sizes)
    segments = ragged_plan(sources, outputs, indices, groups)
    written = new_like(outputs)
    ragged_copy = kernels(sources.array).ragged_copy
    received = entries_of(written, outputs)
    ragged_copy(entries_of(outputs.values, outputs), received, rest_of_outputs(segments, outputs))
    ragged_copy(entries_of(sources.values, sources), received, segments)
    return _in_form(written, sources, outputs)


def _ragged_all_to_all_transpose(
    ct: Values,
    operand: Values,
    output: Values,
    input_offsets: Values,
    send_sizes: Values,
    output_offsets: Values,
    recv_sizes: Values,
    *,
    groups: GroupsLike = None,
    batch_ndim: int = 0,
) -> tuple[Result, Result]:
    """The cotangents of operand and output, for the cotangent ``ct`` of the result.

    The operand's: received slices sent back, zeros in rows that were not sent. Where a sender's
    slices overlap, what comes back for a row is added linearly, in the order of the slices. The
    output's: ``ct``, zeroed exactly where something was received. Of ``operand`` and ``output``
    only shapes and dtypes matter; checks and errors are those of ragged_all_to_all.
    """
    sources = Operand(operand, batch_ndim, "ragged_all_to_all (operand)")
    outputs = Operand(output, batch_ndim, "ragged_all_to_all (output)")
    cotangents = Operand(ct, batch_ndim, "ragged_all_to_all.transpose (ct)")
    indices = (input_offsets, send_sizes, output_offsets, recv_sizes)
    segments = ragged_plan(sources, outputs, indices, groups)
    check_cotangent(cotangents, outputs)
    operand_ct, output_ct = zeros_like(cotangents, sources), copy_of(cotangents)
    if len(segments):
        received = entries_of(cotangents.values, cotangents)
        send_back(received, entries_of(operand_ct, sources), segments, cotangents)
        clear_received(entries_of(output_ct, outputs), segments, cotangents)
    return _in_form(operand_ct, cotangents), _in_form(output_ct, cotangents)


ragged_all_to_all.transpose = _ragged_all_to_all_transpose


def _in_form(values: Any, *operands: Operand) -> Result:
    """A list where one of the operands was a list."""
    return Result(list(values) if any(o.listed for o in operands) else values, True)


def new_like(operand: Operand) -> Any:
    """New arrays like the operand's values, in its form."""
    if operand.listed:
        return [empty(value) for value in operand.values]
    return empty(operand.values)


def copy_of(operand: Operand) -> Any:
    copied = new_like(operand)
    copy(
        [*zip(copied, operand.values, strict=True)]
        if operand.listed
        else [(copied, operand.values)]
    )
    return copied


def zeros_like(like: Operand, operand: Operand) -> Any:
    """Zeros in the shape of the operand's values, in ``like``'s form and array library."""
    shape = (*operand.batch_shape, *operand.shape)
    if like.listed:
        return [np.zeros_like(value, shape=shape, order="C") for value in like.values]
    return np.zeros_like(like.values, shape=(operand.size, *shape), order="C")


def entries_of(values: Any, operand: Operand) -> Sequence[Array]:
    """The arrays (rows, *row) of each replica's batch entries, all views, in the plan's count."""
    if not operand.batch_ndim:
        sequence: Sequence[Array] = values
        return sequence
    return [value[entry] for value in values for entry in np.ndindex(*operand.batch_shape)]


def check_cotangent(ct: Operand, output: Operand) -> None:
    given = (ct.size, *ct.batch_shape, *ct.shape)
    expected = (output.size, *output.batch_shape, *output.shape)
    if given != expected or ct.dtype != output.dtype:
        raise ValueError(
            f"ragged_all_to_all.transpose: ct must be like output, {output.dtype}{list(expected)} "
            f"with the replicas, got {ct.dtype}{list(given)}"
        )


def send_back(
    received: Sequence[Array],
    returned: Sequence[Array],
    segments: NDArray[np.int64],
    cotangents: Operand,
) -> None:
    """Copy received rows to where they were sent from; rows sent more than once get the sum."""
    pairs = overlapping(segments, SENDER, SENT_FROM)
    if len(pairs):
        overlaps = np.isin(segments[:, SENDER], segments[pairs[:, 0], SENDER])
        rows = _rows_of(segments[overlaps])
        # Equal rows become neighbours, and stay in the order of their slices.
        rows = rows[np.lexsort((rows[:, SENT_FROM], rows[:, SENDER]))]
        same = (rows[1:, [SENDER, SENT_FROM]] == rows[:-1, [SENDER, SENT_FROM]]).all(axis=1)
        starts = np.nonzero(np.concatenate([[True], ~same]))[0]
        times = np.diff(starts, append=len(rows))
        repeated = np.repeat(times > 1, times)
        _add_repeated(received, returned, rows[repeated], times[times > 1], cotangents)
        segments = np.concatenate([segments[~overlaps], rows[~repeated]])
    way_back = segments[:, [RECEIVER, WRITTEN_TO, SENDER, SENT_FROM, ROWS]]
    kernels(received[0]).ragged_copy(received, returned, way_back)


def _add_repeated(
    received: Sequence[Array],
    returned: Sequence[Array],
    rows: NDArray[np.int64],
    times: NDArray[np.int64],
    cotangents: Operand,
) -> None:
    """Fold what comes back for each row; ``rows`` holds each of them ``times`` times in a run."""
    starts = np.cumsum(times) - times
    target = np.repeat(np.arange(len(times)), times)
    turn = np.arange(len(rows)) - np.repeat(starts, times)
    shape = (int(times.max()), len(times), *cotangents.shape[1:])
    layers = empty(received[0], shape)
    # -0 is the number that changes no other, -0 included: rows sent less often are padded with it.
    layers[...] = np.negative(libraries.zeros_like(received[0], ()))
    for receiver in np.unique(rows[:, RECEIVER]).tolist():
        here = rows[:, RECEIVER] == receiver
        layers[turn[here], target[here]] = received[receiver][rows[here, WRITTEN_TO]]
    totals = kernels(layers).fold(layers, op="sum", order="linear")
    destination = rows[starts]
    for sender in np.unique(destination[:, SENDER]).tolist():
        here = destination[:, SENDER] == sender
        returned[sender][destination[here, SENT_FROM]] = totals[here]


def _rows_of(segments: NDArray[np.int64]) -> NDArray[np.int64]:
    """The plan with one line for each row instead of each slice."""
    counts = segments[:, ROWS]
    rows = np.repeat(segments, counts, axis=0)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows[:, SENT_FROM] += within
    rows[:, WRITTEN_TO] += within
    rows[:, ROWS] = 1
    return rows


def clear_received(
    output_ct: Sequence[Array], segments: NDArray[np.int64], cotangents: Operand
) -> None:
    """Zero the rows that were received, by copying rows of zeros over them."""
    longest = int(segments[:, ROWS].max())
    nothing = np.zeros_like(output_ct[0], shape=(longest, *cotangents.shape[1:]), order="C")
    from_nothing = segments.copy()
    from_nothing[:, [SENDER, SENT_FROM]] = 0
    kernels(nothing).ragged_copy(nothing[None], output_ct, from_nothing)
