"""Pipelined chains: each instance continues the fold of the one before, block by block, and the
last one's results go round."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...libraries import contiguous
from ...runtime.engines import Pending
from ..kernels import FoldPart, copy, empty, replace_fields
from ..operand import Array
from .job import PREFETCH, DistributedFold, blocks_of, flat, new_result, row_offsets


def pipelined_chain(job: DistributedFold) -> Array:
    """Continue the fold of the instance before, block by block; the last one's results go round."""
    layout = job.layout
    backwards = job.order == "reverse"
    chain = job.instances[::-1] if backwards else job.instances
    rank, last = chain.index(layout.instance), len(chain) - 1
    counts = [int((job.instance_of == i).sum()) for i in chain]
    before = sum(counts[:rank])
    own = [flat(job, value) for value in job.values]
    rows, length = own[0].shape
    out = new_result(job)
    result = flat(job, out)
    blocks = blocks_of(0, length, rows)
    offsets = row_offsets(job)
    partial_spec = replace_fields(job.spec, divisor=None)

    def receive(block: tuple[int, int]) -> tuple[Array, Pending]:
        buffer = empty(job.like, (rows, block[1] - block[0]), job.partial)
        return buffer, layout.exchange([], [(buffer, chain[rank - 1])])

    coming = deque(receive(block) for block in blocks[:PREFETCH]) if rank else deque()
    sent: deque[Pending] = deque()
    delivery = _Delivery(job, chain, result, blocks)
    for number, (first, end) in enumerate(blocks):
        partial = None
        if rank:
            partial, pending = coming.popleft()
            if number + PREFETCH < len(blocks):
                coming.append(receive(blocks[number + PREFETCH]))
            pending.wait()
        members = [value[:, first:end] for value in own]
        part = FoldPart(window=(first, length), partial=partial, before=before, final=rank == last)
        if rank == last:
            target = result[:, first:end]
            job.fold(members, batch_ndim=1, offsets=offsets, part=part, out=target)
        else:
            alone = not rank and len(own) == 1 and own[0].dtype == job.partial
            sends = (
                contiguous(members[0])
                if alone
                else job.fold(members, partial_spec, batch_ndim=1, offsets=offsets, part=part)
            )
            sent.append(layout.exchange([(sends, chain[rank + 1])], []))
            if len(sent) > PREFETCH:
                sent.popleft().wait()
        delivery.step(number)
    for pending in sent:
        pending.wait()
    delivery.finish()
    return out


class _Delivery:
    """The results of a chain's last instance on their way to the first, the second, and so on."""

    def __init__(
        self,
        job: DistributedFold,
        chain: Sequence[int],
        result: Array,
        blocks: list[tuple[int, int]],
    ) -> None:
        self.layout, self.result, self.blocks = job.layout, result, blocks
        rank, count = chain.index(job.layout.instance), len(chain)
        self.source = None if rank == count - 1 else chain[rank - 1]
        forward = (rank + 1) % count
        self.target = None if forward == count - 1 else chain[forward]
        # A block has passed the whole chain when `count` more have begun.
        self.lag = 0 if self.source is None else count
        self.coming: deque[tuple[Array, Pending]] = deque()
        self.asked = 0
        self.done = 0
        self.sent: list[Pending] = []

    def step(self, number: int) -> None:
        """Pass on what is due when this instance has done its part of a block."""
        self._ask(number + PREFETCH)
        if number >= self.lag:
            self._pass_on()

    def finish(self) -> None:
        """Pass on the rest."""
        self._ask(len(self.blocks))
        while self.done < len(self.blocks):
            self._pass_on()
        for pending in self.sent:
            pending.wait()

    def _ask(self, count: int) -> None:
        if self.source is None:
            return
        while self.asked < min(count, len(self.blocks)):
            first, end = self.blocks[self.asked]
            target = self.result[:, first:end]
            contiguous = target.flags.c_contiguous
            buffer = target if contiguous else empty(target)
            pending = self.layout.exchange([], [(buffer, self.source)], results=True)
            self.coming.append((buffer, pending))
            self.asked += 1

    def _pass_on(self) -> None:
        first, end = self.blocks[self.done]
        self.done += 1
        part = self.result[:, first:end]
        if self.source is not None:
            buffer, pending = self.coming.popleft()
            pending.wait()
            if not part.flags.c_contiguous:
                copy([(part, buffer)])
            part = buffer
        if self.target is not None:
            sent = contiguous(part)
            self.sent.append(self.layout.exchange([(sent, self.target)], [], results=True))
