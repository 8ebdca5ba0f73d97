"""The rows of rings with many short blocks: in every block the visit starts at another member.
Neighbouring blocks of one length are loaded together, and skewed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from .decode import decode_all
from .layout import Index
from .members import Members
from .workspace import Workspace

# Elements to a row, for NumPy's loops; and how many blocks there are in one, whose number adds to
# the rows of a chunk: at most a quarter of these.
ROW = 1024
MORE_ROWS = 4


@dataclass(frozen=True)
class Ring:
    """A run of `blocks` of a ring, of equal length; the first one starts at member `start`."""

    start: int
    blocks: int


def ring_runs(
    total: int, members: int, first: int, last: int, limit: int
) -> Iterator[tuple[Ring, int, int]]:
    """The blocks of a ring over `total` elements that lie in first..last-1, in runs: each with its
    first element and the one behind its last.

    A run has at most `limit` elements; short blocks are taken together.
    """
    length, longer = divmod(total, members)
    edge = longer * (length + 1)
    for low, high, number, size in ((0, edge, 0, length + 1), (edge, total, longer, length)):
        start, stop = max(low, first), min(high, last)
        while start < stop:
            block, skipped = divmod(start - low, size)
            blocks = 1
            if skipped or stop - start < size or size > limit:
                end = min(stop, start + size - skipped, start + limit)
            else:
                fit = min(min(ROW, limit) // size, math.isqrt(limit // (MORE_ROWS * size)))
                blocks = min(max(1, fit), (stop - start) // size)
                end = start + blocks * size
            yield Ring(number + block, blocks), start, end
            start = end


def load_ring(
    members: Members,
    box: Index,
    ring: Ring,
    rows: NDArray[Any],
    first: int,
    workspace: Workspace,
) -> float:
    """Write the members visited at turn `first` and on into `rows`; returns a bound."""
    begin = ring.start + first
    if ring.blocks == 1:
        return _load(members, box, rows, begin)
    number, width = len(rows), rows[0].size
    extended = workspace.take(rows.dtype, (number + ring.blocks - 1, *rows.shape[1:]))
    bound = _load(members, box, extended, begin)
    # Row t holds block j of row t + j: that of member start + j, t turns later.
    length = width // ring.blocks
    row, item = extended.strides[0], extended.itemsize
    strides = (row, row + length * item, item)
    skewed = as_strided(extended, (number, ring.blocks, length), strides, writeable=False)
    rows.reshape(skewed.shape)[...] = skewed
    workspace.give(extended)
    return bound


def _load(members: Members, box: Index, rows: NDArray[Any], begin: int) -> float:
    """The blocks of members begin, begin + 1, ..., where member 0 follows the last."""
    bound, done = 0.0, 0
    while done < len(rows):
        member = (begin + done) % members.count
        stop = min(members.count, member + len(rows) - done)
        part = rows[done : done + stop - member]
        bound = max(bound, decode_all(members.rows(slice(member, stop), box), part))
        done += len(part)
    return bound
