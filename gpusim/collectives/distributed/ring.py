"""Ring folds across instances: the blocks that start at an instance's members travel round all
instances, and return for the members before them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from gpusim.fallback.orders import ring_bounds

from ...libraries import call_on_bits, contiguous
from ...runtime.engines import Pending
from ..kernels import FoldPart, copy, empty, replace_fields
from ..operand import Array
from .job import PREFETCH, DistributedFold, blocks_of, flat, new_result, row_offsets

Piece = tuple[int, int, int]  # ring block, first element, end


def ring_fold(job: DistributedFold) -> Array:
    """Fold by a ring: blocks that start at an instance's members travel round all instances."""
    ring = _Ring(job)
    ring.run()
    return ring.out


class _Ring:
    """A ring whose members are runs on each instance.

    The region of an instance is made of the blocks that begin at its members. It is folded with
    those from there on, goes round the others, and comes home for the members before. The first
    block has none of those: it is finished by the last of the others.
    """

    def __init__(self, job: DistributedFold) -> None:
        assert job.runs is not None
        self.job, self.layout, self.runs = job, job.layout, job.runs
        self.own = [flat(job, value) for value in job.values]
        self.rows, self.length = self.own[0].shape
        self.out = new_result(job)
        self.result = flat(job, self.out)
        self.bounds = ring_bounds(self.length, len(job.members))
        self.count = len(self.runs)
        self.offsets = row_offsets(job)
        self.previous = job.instances[job.rank - 1]
        self.next = job.instances[(job.rank + 1) % self.count]

    def pieces(self, turn: int) -> list[Piece]:
        """The region of an instance in pieces (ring block, first element, end), small enough to be
        on their way while others are folded.

        Blocks are merged, except for the region's first, if no random numbers distinguish their
        additions.
        """
        first, end = self.runs[turn]
        blocks = [(b, self.bounds[b], self.bounds[b + 1]) for b in range(first, end)]
        if not self.job.stochastic and len(blocks) > 2:
            blocks[1:] = [(first + 1, self.bounds[first + 1], self.bounds[end])]
        return [
            (block, start, stop)
            for block, low, high in blocks
            for start, stop in blocks_of(low, high, self.rows)
            if stop > start
        ]

    def members(self, piece: Piece, chosen: slice) -> list[Array]:
        return [value[:, piece[1] : piece[2]] for value in self.own[chosen]]

    def fold(
        self,
        piece: Piece,
        members: list[Array],
        partial: Array | None,
        before: int,
        out: Array | None = None,
    ) -> Array:
        """A piece folded with some members, linear from its block's first.

        The fold ends, into `out`, if that is given; else the result is a partial one.
        """
        final = out is not None
        spec = replace_fields(self.job.spec, order="linear")
        return self.job.fold(
            members,
            spec if final else replace_fields(spec, divisor=None),
            batch_ndim=1,
            offsets=self.offsets,
            part=FoldPart(
                window=(piece[1], self.length), partial=partial, before=before, final=final
            ),
            out=out,
        )

    def end(self, piece: Piece, partial: Array, before: int, chosen: slice) -> None:
        """The piece folded with the last of all members."""
        target = self.result[:, piece[1] : piece[2]]
        self.fold(piece, self.members(piece, chosen), partial, before, target)

    def run(self) -> None:
        turn, count = self.job.rank, self.count
        first = self.runs[turn][0]
        sent: list[Pending] = []
        # What is sent in one step is received in the next one, by instances that do not wait for
        # each other's sends before that: they go round in a circle.
        before_last: list[Pending] = []

        def send(part: Array) -> None:
            sent.append(self.layout.exchange([(part, self.next)], []))

        for piece in self.pieces(turn):
            send(self._start(piece, first))
        for step in range(1, count):
            before_last, sent = sent, []
            home = (turn - step) % count
            begun = self.runs[home][0]
            for piece, partial in self._arriving(self.pieces(home)):
                before = (first - piece[0]) % len(self.job.members)
                finishes = step == count - 1 and piece[0] == begun
                if finishes:
                    self.end(piece, partial, before, slice(None))
                else:
                    send(self.fold(piece, self.members(piece, slice(None)), partial, before))
            for pending in before_last:
                pending.wait()
        rest = [piece for piece in self.pieces(turn) if piece[0] != first]
        for piece, partial in self._arriving(rest):
            self._finish(piece, partial, first)
        for pending in sent:
            pending.wait()
        self._share()

    def _start(self, piece: Piece, first: int) -> Array:
        """The piece folded with the members from its block's on; blocks that were put together are
        told apart here."""
        if len(self.own) == 1 and self.own[0].dtype == self.job.partial:
            return contiguous(self.own[0][:, piece[1] : piece[2]])
        parts = []
        for part in self._apart(piece):
            members = self.members(part, slice(part[0] - first, None))
            parts.append(self.fold(part, members, None, 0))
        return parts[0] if len(parts) == 1 else call_on_bits(np.concatenate, parts, 1)

    def _finish(self, piece: Piece, partial: Array, first: int) -> None:
        """The piece, come home, folded with the members before its block's."""
        begin = piece[1]
        for block, low, high in self._apart(piece):
            part = contiguous(partial[:, low - begin : high - begin])
            before = len(self.job.members) - (block - first)
            members = slice(0, block - first)
            self.end((block, low, high), part, before, members)

    def _apart(self, piece: Piece) -> Iterator[Piece]:
        block, start, stop = piece
        while start < stop:
            high = min(stop, self.bounds[block + 1])
            if high > start:
                yield block, start, high
            start, block = max(start, high), block + 1

    def _arriving(self, pieces: list[Piece]) -> Iterator[tuple[Piece, Array]]:
        """Pieces from the instance before, as they come."""
        coming: deque[tuple[Array, Pending]] = deque()

        def ask(piece: Piece) -> None:
            buffer = empty(self.job.like, (self.rows, piece[2] - piece[1]), self.job.partial)
            pending = self.layout.exchange([], [(buffer, self.previous)])
            coming.append((buffer, pending))

        for piece in pieces[: 4 * PREFETCH]:
            ask(piece)
        for number, piece in enumerate(pieces):
            if number + 4 * PREFETCH < len(pieces):
                ask(pieces[number + 4 * PREFETCH])
            buffer, pending = coming.popleft()
            pending.wait()
            yield piece, buffer

    def _share(self) -> None:
        """Everybody gets all blocks: the first of a region from the instance before, the others
        from the region's own."""
        turn, count = self.job.rank, self.count

        def ranges(of: int) -> list[tuple[int, int]]:
            """The ranges that an instance has finished."""
            first, end = self.runs[of]
            begun = self.runs[(of + 1) % count][0]
            return [
                (self.bounds[first + 1], self.bounds[end]),
                (self.bounds[begun], self.bounds[begun + 1]),
            ]

        others = [i for i in range(count) if i != turn]
        mine = [contiguous(self.result[:, low:high]) for low, high in ranges(turn)]
        sends = [(part, self.job.instances[i]) for part in mine for i in others]
        receives, arrived = [], []
        for other in others:
            for low, high in ranges(other):
                target = self.result[:, low:high]
                buffer = target
                if not target.flags.c_contiguous:
                    buffer = empty(target)
                    arrived.append((target, buffer))
                receives.append((buffer, self.job.instances[other]))
        self.layout.exchange(sends, receives, results=True).wait()
        for target, source in arrived:
            copy([(target, source)])
