"""The ragged copy: segments of rows from sources to destinations, with unequal lengths.
Whoever calls it has checked the segments already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Segments shorter than this on average are copied through indices, several at a time: a slice
# assignment costs about as much as gathering this many rows.
SHORT_SEGMENT = 16
ROWS_AT_ONCE = 64 * 1024


def ragged_copy(
    sources: NDArray[Any] | Sequence[NDArray[Any]],
    output: NDArray[Any] | Sequence[NDArray[Any]],
    segments: NDArray[np.int64],
) -> None:
    """Copy segments of rows from `sources` into `output`, in place.

    **Arguments**

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
    filled = segments[segments[:, 4] > 0]
    stacked = isinstance(sources, np.ndarray) and isinstance(output, np.ndarray)
    if stacked and len(filled) and filled[:, 4].mean() < SHORT_SEGMENT:
        for part in np.array_split(filled, -(-int(filled[:, 4].sum()) // ROWS_AT_ONCE)):
            _copy_by_index(sources, output, part)
        return
    for source, start, destination, to, rows in filled.tolist():
        output[destination][to : to + rows] = sources[source][start : start + rows]


def _copy_by_index(
    sources: NDArray[Any] | Sequence[NDArray[Any]],
    output: NDArray[Any] | Sequence[NDArray[Any]],
    segments: NDArray[np.int64],
) -> None:
    """One gather and one scatter for all rows of the segments."""
    assert isinstance(sources, np.ndarray) and isinstance(output, np.ndarray)
    source, start, destination, to, rows = segments.T
    first = np.cumsum(rows) - rows
    position = np.arange(int(rows.sum())) - np.repeat(first, rows)  # of a row in its segment
    read = np.repeat(source, rows), np.repeat(start, rows) + position
    write = np.repeat(destination, rows), np.repeat(to, rows) + position
    output[write] = sources[read]
