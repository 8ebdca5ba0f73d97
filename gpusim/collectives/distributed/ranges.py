"""Folds by ranges of elements: each instance receives its range from all members, folds it, and
sends the result to all others."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

import numpy as np

from ...libraries import contiguous
from ...runtime.engines import Buffer, Pending
from ..kernels import FoldPart, copy, empty
from ..operand import Array
from .job import PREFETCH, DistributedFold, blocks_of, flat, new_result, row_offsets
from .layout import LONG_MESSAGE

Share = tuple[int, int]  # first element, end


def fold_by_ranges(job: DistributedFold) -> Array:
    """The fold of a group whose members may lie on any instances, in any order."""
    return _Ranges(job).fold()


class _Ranges:
    """One fold, cut into blocks of elements, and each block into a share for every instance."""

    def __init__(self, job: DistributedFold) -> None:
        self.job, self.layout, self.instances = job, job.layout, job.instances
        self.own = [flat(job, value) for value in job.values]
        self.rows, self.length = self.own[0].shape
        self.out = new_result(job)
        self.result = flat(job, self.out)
        self.positions = [np.flatnonzero(job.instance_of == i).tolist() for i in self.instances]
        members = -(-self.rows * len(job.members) // len(self.instances))
        self.blocks = [
            _shares(first, end, len(self.instances))
            for first, end in blocks_of(0, self.length, members)
        ]
        self.finals: deque[tuple[Pending, list[tuple[Array, Array]]]] = deque()

    def fold(self) -> Array:
        under_way = deque(self.gather(shares) for shares in self.blocks[:PREFETCH])
        for number, shares in enumerate(self.blocks):
            members, pending = under_way.popleft()
            if number + PREFETCH < len(self.blocks):
                under_way.append(self.gather(self.blocks[number + PREFETCH]))
            pending.wait()
            self.fold_share(members, shares)
            if len(self.finals) > PREFETCH:
                self.take_results()
        while self.finals:
            self.take_results()
        return self.out

    def gather(self, shares: list[Share]) -> tuple[list[Array], Pending]:
        """This instance's share of all members, in the group's order, when it has come."""
        first, end = shares[self.job.rank]
        members: list[Any] = [None] * len(self.job.members)
        sends: list[Buffer] = []
        receives: list[Buffer] = []
        for instance, positions, (start, stop) in zip(
            self.instances, self.positions, shares, strict=True
        ):
            if instance == self.layout.instance:
                parts: Any = [value[:, first:end] for value in self.own]
            else:
                sends += self.messages([v[:, start:stop] for v in self.own], instance)
                shape = (len(positions), self.rows, end - first)
                parts = buffer = empty(self.job.like, shape, self.own[0].dtype)
                apart = self.apart(end - first)
                receives += [(p, instance) for p in (buffer if apart else [buffer])]
            for position, part in zip(positions, parts, strict=True):
                members[position] = part
        return members, self.layout.exchange(sends, receives)

    def take_results(self) -> None:
        """Put the others' shares of the first block that is out in place."""
        pending, arrived = self.finals.popleft()
        pending.wait()
        copy(arrived)

    def apart(self, width: int) -> bool:
        """Whether members of this width are sent in place, in one message each."""
        return self.rows == 1 and width * self.own[0].itemsize >= LONG_MESSAGE

    def messages(self, parts: list[Array], to: int) -> list[Buffer]:
        if self.apart(parts[0].shape[1]):
            return [(contiguous(part), to) for part in parts]
        packed = empty(parts[0], (len(parts), *parts[0].shape))
        copy([*zip(packed, parts, strict=True)])
        return [(packed, to)]

    def fold_share(self, members: list[Array], shares: list[Share]) -> None:
        """Fold this instance's share, give it to the others, and ask for theirs."""
        first, end = shares[self.job.rank]
        target = self.result[:, first:end]
        part = self.job.fold(
            members,
            batch_ndim=1,
            offsets=row_offsets(self.job),
            part=FoldPart(window=(first, self.length), nodes=self.job.nodes),
            out=target,
        )
        sends = [(part, other) for other in self.instances if other != self.layout.instance]
        receives, arrived = [], []
        for other, (start, stop) in zip(self.instances, shares, strict=True):
            if other == self.layout.instance:
                continue
            target = self.result[:, start:stop]
            buffer = target
            if not target.flags.c_contiguous:
                buffer = empty(target)
                arrived.append((target, buffer))
            receives.append((buffer, other))
        self.finals.append((self.layout.exchange(sends, receives, results=True), arrived))


def _shares(first: int, end: int, count: int) -> list[Share]:
    edges = [first + (end - first) * k // count for k in range(count + 1)]
    return list(pairwise(edges))
