"""The copies of a ragged_all_to_all; all arguments are checked before anything is written.

The plan is a table with one row for each slice that is not empty.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpusim.fallback import kernels as sets

from ..groups import Groups
from ..libraries import to_host
from .operand import Operand

#: The columns of the plan, as `fallback.ragged_copy` wants them; replicas are counted together
#: with their batch entries, replica * entries + entry.
SENDER, SENT_FROM, RECEIVER, WRITTEN_TO, ROWS = range(5)

INDEX_NAMES = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")


class Indices(NamedTuple):
    """The four index arguments, each (replicas, batch entries, slices) in int64."""

    input_offsets: NDArray[np.int64]
    send_sizes: NDArray[np.int64]
    output_offsets: NDArray[np.int64]
    recv_sizes: NDArray[np.int64]


def ragged_plan(
    operand: Operand, output: Operand, indices: tuple[Operand, ...], groups: Groups | None
) -> NDArray[np.int64]:
    """The checked segments (slices that are not empty, 5), ordered by sender and slice."""
    partition = check_arguments(operand, output, indices, groups)
    return plan_slices(operand, output, indices, partition)


def check_arguments(
    operand: Operand, output: Operand, indices: tuple[Operand, ...], groups: Groups | None
) -> Groups:
    """Refuse arguments of wrong shapes and dtypes.

    **Returns** the groups, also where none are given.
    """
    _check_data(operand, output)
    partition = groups or Groups.all(operand.size)
    _check_indices(operand, indices, partition.group_size)
    return partition


def plan_slices(
    operand: Operand, output: Operand, indices: tuple[Operand, ...], partition: Groups
) -> NDArray[np.int64]:
    """`ragged_plan` of arguments whose shapes are right."""
    stacked = read_indices(operand, indices)
    if (compiled := sets.compiled()) is not None:
        sizes = operand.shape[0], output.shape[0]
        checked = compiled.check_slices(stacked, partition.matrix, *sizes)
        if checked is not None:
            return checked
    table, slices = Indices(*stacked), stacked.shape[3]
    receiver, receiving_slice = _routes(partition, slices)
    _check_numbers(table, receiver, receiving_slice, operand, output)
    segments = _segments(table, receiver)
    slice_of = np.arange(len(segments)) % slices
    filled = segments[:, ROWS] > 0
    if not filled.all():
        segments, slice_of = segments[filled], slice_of[filled]
    _check_overlaps(segments, slice_of, operand, output.shape[0])
    return segments


def overlapping(
    segments: NDArray[np.int64], replica: int, start: int, rows: int
) -> NDArray[np.int64]:
    """Pairs (n, 2) of segments that overlap, with neighbours by the two columns compared.

    A segment that overlaps any other overlaps a neighbour, so no pair means no overlap. Each
    replica has so many `rows`.
    """
    if not len(segments) or _are_apart(segments, replica, start, rows):
        return np.empty((0, 2), np.int64)
    order = np.lexsort((segments[:, start], segments[:, replica]))
    before, after = order[:-1], order[1:]
    same = segments[before, replica] == segments[after, replica]
    reach = segments[before, start] + segments[before, ROWS]
    hit = same & (segments[after, start] < reach)
    return np.stack([before[hit], after[hit]], axis=1)


def _are_apart(segments: NDArray[np.int64], replica: int, start: int, rows: int) -> bool:
    """Whether no two segments overlap, by counting those that cover each row; False where there are
    so many rows that sorting the segments is faster."""
    places = int(segments[:, replica].max() + 1) * (rows + 1)
    if places > 16 * len(segments):
        return False
    first = segments[:, replica] * (rows + 1) + segments[:, start]
    covering = np.bincount(first, minlength=places)
    covering -= np.bincount(first + segments[:, ROWS], minlength=places)
    return int(np.cumsum(covering, out=covering).max()) <= 1


def rest_of_outputs(segments: NDArray[np.int64], output: Operand) -> NDArray[np.int64]:
    """The rows of each output that no segment writes, as segments from the output to the result."""
    rows, count = output.shape[0], output.size * int(np.prod(output.batch_shape, dtype=np.int64))
    if segments[:, ROWS].sum() == rows * count:
        return np.empty((0, 5), np.int64)
    ends = np.zeros((count, 5), np.int64)  # of length 0, behind each output's last row
    ends[:, RECEIVER], ends[:, WRITTEN_TO] = np.arange(count), rows
    table = np.concatenate([segments, ends])
    table = table[np.argsort(table[:, RECEIVER] * (rows + 1) + table[:, WRITTEN_TO], kind="stable")]
    reach = table[:, WRITTEN_TO] + table[:, ROWS]
    begin = np.roll(reach, 1)  # a gap begins where the segment before ends
    begin[table[:, RECEIVER] != np.roll(table[:, RECEIVER], 1)] = 0
    begin[:1] = 0
    size = table[:, WRITTEN_TO] - begin
    gaps = np.stack([table[:, RECEIVER], begin, table[:, RECEIVER], begin, size], axis=1)
    return gaps[size > 0]


def _check_data(operand: Operand, output: Operand) -> None:
    for name, data in (("operand", operand), ("output", output)):
        if data.ndim < 1:
            raise ValueError(
                f"ragged_all_to_all: {name} must have an axis of rows, got shape {data.shape}"
            )
    _check_replicas("output", output, operand)
    if operand.shape[1:] != output.shape[1:] or operand.dtype != output.dtype:
        raise ValueError(
            "ragged_all_to_all: rows of operand and output must have one shape and dtype, got "
            f"{operand.dtype}{list(operand.shape[1:])} and "
            f"{output.dtype}{list(output.shape[1:])}"
        )


def _check_replicas(name: str, given: Operand, operand: Operand) -> None:
    if (given.size, given.batch_shape) != (operand.size, operand.batch_shape):
        raise ValueError(
            f"ragged_all_to_all: {name} has replica and batch axes "
            f"{(given.size, *given.batch_shape)}, operand has "
            f"{(operand.size, *operand.batch_shape)}"
        )


def _check_indices(operand: Operand, indices: tuple[Operand, ...], group_size: int) -> None:
    given = dict(zip(INDEX_NAMES, indices, strict=True))
    for name, values in given.items():
        _check_replicas(name, values, operand)
        if values.dtype.kind not in "iu":
            raise ValueError(
                f"ragged_all_to_all: {name} must be of integer type, got {values.dtype}"
            )
        if values.ndim != 1 or values.shape[0] < 1:
            raise ValueError(
                f"ragged_all_to_all: {name} must have one axis with at least one slice, "
                f"got shape {values.shape}"
            )
    lengths = {name: values.shape[0] for name, values in given.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"ragged_all_to_all: lengths must be equal, got {lengths}")
    slices = lengths["send_sizes"]
    if slices % group_size:
        raise ValueError(
            f"ragged_all_to_all: the number of slices must be divisible by the group's "
            f"{group_size} replicas, got {slices} slices"
        )


def read_indices(operand: Operand, indices: tuple[Operand, ...]) -> NDArray[np.int64]:
    """The index arguments, (4, replicas, batch entries, slices)."""
    slices = indices[0].shape[0]
    entries = int(np.prod(operand.batch_shape, dtype=np.int64))
    table = np.empty((len(INDEX_NAMES), operand.size, entries, slices), np.int64)
    for row, values in zip(table, indices, strict=True):
        stacked = to_host(values.stacked())  # which waits, as the checks do
        if stacked.dtype == np.uint64:  # larger ones stay larger than any array
            stacked = np.minimum(stacked, np.iinfo(np.int64).max)
        row[...] = stacked.reshape(row.shape)
    return table


def _routes(groups: Groups, slices: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The receiver of each replica's slices (replicas, slices), and which of its slices each is."""
    per_member = slices // groups.group_size
    member, within = np.divmod(np.arange(slices), per_member)
    receiver = np.empty((groups.size, slices), dtype=np.int64)
    position = np.empty((groups.size, 1), dtype=np.int64)
    receiver[groups.matrix] = groups.matrix[:, None, member]
    position[groups.matrix, 0] = np.arange(groups.group_size)
    return receiver, position * per_member + within


def _check_numbers(
    table: Indices,
    receiver: NDArray[np.int64],
    receiving_slice: NDArray[np.int64],
    operand: Operand,
    output: Operand,
) -> None:
    """Refuse negative numbers, sends that disagree with receives, and ends past the end."""
    for name, values in zip(INDEX_NAMES, table, strict=True):
        if (where := _first(values < 0)) is not None:
            raise ValueError(
                f"ragged_all_to_all: {name} must not be negative, got {values[where]} on "
                f"{_slice_of(where, operand)}"
            )
    sent, entries = table.send_sizes, np.arange(table.send_sizes.shape[1])
    expected = table.recv_sizes[receiver[:, None, :], entries[:, None], receiving_slice[:, None, :]]
    if (where := _first(sent != expected)) is not None:
        replica, _, k = where
        raise ValueError(
            f"ragged_all_to_all: {_slice_of(where, operand)} has send_sizes {sent[where]}, but its "
            f"receiver, replica {receiver[replica, k]}, has recv_sizes {expected[where]} in slice "
            f"{receiving_slice[replica, k]}"
        )
    ends: tuple[tuple[str, NDArray[np.int64], Operand], ...] = (
        ("input_offsets", table.input_offsets, operand),
        ("output_offsets", table.output_offsets, output),
    )
    for name, offsets, data in ends:
        rows = data.shape[0]
        # Both comparisons, because offset + size could overflow.
        if (where := _first((offsets > rows) | (sent > rows - offsets))) is not None:
            whose = "its operand" if data is operand else "the receiver's output"
            receiver_is = f" (replica {receiver[where[0], where[2]]})" if data is output else ""
            raise ValueError(
                f"ragged_all_to_all: {_slice_of(where, operand)} with {name} {offsets[where]} and "
                f"size {sent[where]} ends past the {rows} rows of {whose}{receiver_is}"
            )


def _segments(table: Indices, receiver: NDArray[np.int64]) -> NDArray[np.int64]:
    """One row for each slice of each sender, the empty ones included."""
    replicas, entries, slices = table.send_sizes.shape
    entry = np.arange(entries)[:, None]
    segments = np.empty((replicas, entries, slices, 5), np.int64)
    segments[..., SENDER] = np.arange(replicas)[:, None, None] * entries + entry
    segments[..., SENT_FROM] = table.input_offsets
    segments[..., RECEIVER] = receiver[:, None, :] * entries + entry
    segments[..., WRITTEN_TO] = table.output_offsets
    segments[..., ROWS] = table.send_sizes
    return segments.reshape(-1, 5)


def _check_overlaps(
    segments: NDArray[np.int64], slice_of: NDArray[np.int64], operand: Operand, rows: int
) -> None:
    """Refuse slices that meet on a receiver: which of them would be written last?"""
    pairs = overlapping(segments, RECEIVER, WRITTEN_TO, rows)
    if not len(pairs):
        return
    entries = int(np.prod(operand.batch_shape, dtype=np.int64))
    written = []
    for segment in pairs[0]:
        sender, _, _, start, rows = segments[segment].tolist()
        where = (sender // entries, sender % entries, int(slice_of[segment]))
        written.append(f"{_slice_of(where, operand)} writes rows {start}:{start + rows}")
    receiver = segments[pairs[0, 0], RECEIVER] // entries
    raise ValueError(
        f"ragged_all_to_all: slices overlap on their receiver, replica {receiver}: "
        f"{written[0]}, {written[1]}"
    )


def _first(fault: NDArray[np.bool_]) -> tuple[int, ...] | None:
    """The index of the first True."""
    return tuple(np.argwhere(fault)[0].tolist()) if fault.any() else None


def _slice_of(where: tuple[int, ...], operand: Operand) -> str:
    replica, entry, k = where
    batch = tuple(int(i) for i in np.unravel_index(entry, operand.batch_shape))
    return f"replica {replica}, slice {k}" + (f" (batch entry {batch})" if batch else "")


def check_cotangent(ct: Operand, output: Operand) -> None:
    given = (ct.size, *ct.batch_shape, *ct.shape)
    expected = (output.size, *output.batch_shape, *output.shape)
    if given != expected or ct.dtype != output.dtype:
        raise ValueError(
            f"ragged_all_to_all.transpose: ct must be like output, {output.dtype}{list(expected)} "
            f"with the replicas, got {ct.dtype}{list(given)}"
        )
