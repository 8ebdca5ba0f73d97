"""The rows of ragged_all_to_all: new arrays for them, and the copies back to their senders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.fallback import kernels as sets

from .. import libraries
from ..groups import Groups
from .kernels import FoldSpec, copy, empty, kernels, run_fold
from .operand import Array, Operand
from .ragged_plan import (
    RECEIVER,
    ROWS,
    SENDER,
    SENT_FROM,
    WRITTEN_TO,
    overlapping,
    read_indices,
)

#: The dtypes of index arguments that are read as they are.
TABLES = ({np.dtype(np.int32)}, {np.dtype(np.int64)})


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
        return [libraries.zeros_like(value, shape) for value in like.values]
    return libraries.zeros_like(like.values, (operand.size, *shape))


def entries_of(values: Any, operand: Operand) -> Sequence[Array]:
    """The arrays (rows, *row) of each replica's batch entries, all views, in the plan's count."""
    if not operand.batch_ndim:
        sequence: Sequence[Array] = values
        return sequence
    return [value[entry] for value in values for entry in np.ndindex(*operand.batch_shape)]


def exchange_at_once(
    written: Any,
    operand: Operand,
    output: Operand,
    indices: tuple[Operand, ...],
    partition: Groups,
) -> bool:
    """Check the slices and copy the rows of stacked arrays, by one compiled kernel.

    False: a slice is wrong, or the case is left to the plan, which says what is wrong.
    """
    compiled = sets.compiled()
    if compiled is None or not all(type(data.values) is np.ndarray for data in (operand, output)):
        return False
    shape = (operand.size, math.prod(operand.batch_shape))
    target, source, rest = (
        values.reshape(*shape, *values.shape[1 + operand.batch_ndim :])
        for values in (written, operand.values, output.values)
    )
    given = [libraries.to_host(values.stacked()) for values in indices]
    if {table.dtype for table in given} not in TABLES:
        given = [*read_indices(operand, indices)]
    tables = [table.reshape(*shape, indices[0].shape[0]) for table in given]
    return compiled.exchange_rows(target, source, rest, tables, partition.matrix)


def send_back(
    received: Sequence[Array],
    returned: Sequence[Array],
    segments: NDArray[np.int64],
    cotangents: Operand,
) -> None:
    """Copy received rows back to their sources; rows that were sent several times get the sum."""
    pairs = overlapping(segments, SENDER, SENT_FROM, returned[0].shape[0])
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
    bits = libraries.as_bits(layers)
    # -0 is the number that changes no other, -0 included: rows sent less often are padded with it.
    padding = libraries.to_library_of(layers, np.negative(np.zeros((), layers.dtype)))
    copy([(layers, padding)])
    for receiver in np.unique(rows[:, RECEIVER]).tolist():
        here = rows[:, RECEIVER] == receiver
        arrived = libraries.as_bits(received[receiver])
        bits[turn[here], target[here]] = arrived[rows[here, WRITTEN_TO]]
    totals = libraries.as_bits(run_fold(FoldSpec(), layers))
    destination = rows[starts]
    for sender in np.unique(destination[:, SENDER]).tolist():
        here = destination[:, SENDER] == sender
        libraries.as_bits(returned[sender])[destination[here, SENT_FROM]] = totals[here]


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
    nothing = libraries.zeros_like(output_ct[0], (longest, *cotangents.shape[1:]))
    from_nothing = segments.copy()
    from_nothing[:, [SENDER, SENT_FROM]] = 0
    kernels(nothing).ragged_copy(nothing[None], output_ct, from_nothing)
