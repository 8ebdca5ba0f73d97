"""The ragged copy: segments of rows from sources to destinations, with unequal lengths.
The caller has checked the segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import kernels, threads
from .copies import copy

Rows = NDArray[np.int64]

# Segments of fewer bytes than this on average are copied row by row through an index, all rows of
# a stretch of the output at once: a slice assignment takes about as long as copying this much.
SHORT_SEGMENT = 16 * 1024
# Rows copied at a time, and the bytes of them.
ROWS_AT_ONCE = 64 * 1024
STRETCH = 1024 * 1024

SOURCE, FROM, DESTINATION, TO, ROWS = range(5)


def ragged_copy(
    sources: NDArray[Any] | Sequence[NDArray[Any]],
    output: NDArray[Any] | Sequence[NDArray[Any]],
    segments: NDArray[np.int64],
) -> None:
    """Copy segments of rows from `sources` into `output`, in place.

    **Arguments**:

    - `sources`: arrays of shape `(N, *row)`, by source replica: one array with a leading axis, or
      a sequence.
    - `output`: writable arrays of shape `(M, *row)`, by destination replica, likewise.
    - `segments`: integers of shape `(S, 5)`; the columns are source replica, first source row,
      destination replica, first destination row, number of rows. They lie inside their arrays, and
      those of one destination do not overlap.

    >>> import numpy as np
    >>> sources = np.array([[1, 2, 2], [3, 4, 0]])
    >>> output = np.zeros((2, 4), int)
    >>> ragged_copy(sources, output, np.array([[0, 1, 1, 0, 2], [1, 0, 1, 2, 1]]))
    >>> output.tolist()
    [[0, 0, 0, 0], [2, 2, 3, 0]]
    """
    read, write = _flat(sources), _flat(output)
    if read is not None and write is not None and (compiled := kernels.compiled()) is not None:
        size = int(segments[:, ROWS].sum()) * read.itemsize * read.shape[2]
        if not size or compiled.copy_segments(read, write, segments, size):
            return
    merged = _merge(segments[segments[:, ROWS] > 0])
    if not len(merged):
        return
    if read is not None and write is not None:
        length = int(merged[:, ROWS].sum()) * read.itemsize * read.shape[2]
        if length < SHORT_SEGMENT * len(merged):
            _copy_by_index(read, write, merged)
            return
    # In the order of the output: new memory is cleared in pages larger than many a segment.
    merged = merged[np.lexsort((merged[:, TO], merged[:, DESTINATION]))]
    copy(
        (output[destination][to : to + rows], sources[source][start : start + rows])
        for source, start, destination, to, rows in merged.tolist()
    )


def _merge(segments: Rows) -> Rows:
    """Neighbours in the list that go on where the one before ends become one segment."""
    before, after = segments[:-1], segments[1:]
    goes_on = (before[:, SOURCE] == after[:, SOURCE]) & (
        before[:, DESTINATION] == after[:, DESTINATION]
    )
    for column in (FROM, TO):
        goes_on &= before[:, column] + before[:, ROWS] == after[:, column]
    if not goes_on.any():
        return segments
    first = np.concatenate([[0], np.flatnonzero(~goes_on) + 1])
    merged = segments[first]
    merged[:, ROWS] = np.add.reduceat(segments[:, ROWS], first)
    return merged


def _flat(arrays: NDArray[Any] | Sequence[NDArray[Any]]) -> NDArray[Any] | None:
    """A stacked array as (replicas, rows, elements of a row), if that is a view."""
    if not isinstance(arrays, np.ndarray) or not arrays.flags.c_contiguous or not arrays.size:
        return None
    return arrays.reshape(*arrays.shape[:2], -1)


def _copy_by_index(read: NDArray[Any], write: NDArray[Any], segments: Rows) -> None:
    """Rows are numbered through all replicas, and written in their order."""
    source = segments[:, SOURCE] * read.shape[1] + segments[:, FROM]
    target = segments[:, DESTINATION] * write.shape[1] + segments[:, TO]
    rows, unit = segments[:, ROWS], _common_unit(read, write, segments)
    read = read.reshape(-1, unit * read.shape[2])
    write = write.reshape(-1, unit * write.shape[2])
    order = np.argsort(target, kind="stable")
    source, target, rows = (column[order] // unit for column in (source, target, rows))

    def copy_part(part: slice) -> None:
        """All rows of some segments; what is written without a gap is gathered in place."""
        first, to, lengths = source[part], target[part], rows[part]
        ends = np.cumsum(lengths)
        offset = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        index = np.repeat(first, lengths) + offset
        if int(to[-1] + lengths[-1] - to[0]) == len(index):
            # "clip", as "raise" would gather into a buffer first.
            np.take(read, index, axis=0, out=write[to[0] : to[0] + len(index)], mode="clip")
        else:
            write[np.repeat(to, lengths) + offset] = read[index]

    length = min(ROWS_AT_ONCE, STRETCH // max(1, read.shape[1] * read.itemsize))
    parts = _stretches(target, rows, max(1, length))
    threads.share(copy_part, parts, int(rows.sum()) * read.shape[1])


def _common_unit(read: NDArray[Any], write: NDArray[Any], segments: Rows) -> int:
    """The largest number of rows that divides all positions: they are copied as one."""
    unit = int(np.gcd(read.shape[1], write.shape[1]))
    for some in (segments[:64], segments):
        if unit > 1:
            unit = int(np.gcd.reduce(some[:, [FROM, TO, ROWS]], axis=None, initial=unit))
    return unit


def _stretches(target: Rows, rows: Rows, length: int) -> Iterator[slice]:
    """Slices of segments, sorted by target, with about `length` rows each; new ones begin at gaps
    unless these are so frequent that the stretches would be short."""
    count = len(target)
    gaps = np.flatnonzero(target[1:] != target[:-1] + rows[:-1]) + 1
    done = np.cumsum(rows)
    total = int(done[-1])
    cuts = set(np.searchsorted(done, np.arange(length, total, length)).tolist())
    if len(gaps) * length < 4 * total:
        cuts.update(gaps.tolist())
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < count), count]
    for start, stop in pairwise(edges):
        yield slice(start, stop)
