"""Folds that are passed on: each instance goes on with what the one before has folded, block by
block, and the last one's results go round."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from ...runtime.engines import Pending
from ..kernels import empty
from ..operand import Array
from .spread import contiguous
from .task import AHEAD, Task, blocks_of, flat, new_result, places_of


def passed_on(task: Task) -> Array:
    """Each instance goes on with what the one before has folded, block by block; the last one's
    results go round."""
    spread = task.spread
    backwards = task.order == "reverse"
    chain = task.instances[::-1] if backwards else task.instances
    turn, last = chain.index(spread.own), len(chain) - 1
    counts = [int((task.owners == i).sum()) for i in chain]
    before = sum(counts[:turn])
    own = [flat(task, value) for value in task.values]
    rows, length = own[0].shape
    out = new_result(task)
    result = flat(task, out)
    blocks = blocks_of(0, length, rows)
    places = places_of(task)

    def receive(block: tuple[int, int]) -> tuple[Array, Pending]:
        buffer = empty(task.like, (rows, block[1] - block[0]), task.partial)
        return buffer, spread.exchange([], [(buffer, chain[turn - 1])])

    coming = deque(receive(block) for block in blocks[:AHEAD]) if turn else deque()
    sent: deque[Pending] = deque()
    delivery = _Delivery(task, chain, result, blocks)
    for number, (first, end) in enumerate(blocks):
        partial = None
        if turn:
            partial, pending = coming.popleft()
            if number + AHEAD < len(blocks):
                coming.append(receive(blocks[number + AHEAD]))
            pending.wait()
        members = [value[:, first:end] for value in own]
        how = {
            **task.how,
            "places": places,
            "batch_ndim": 1,
            "window": (first, length),
            "partial": partial,
            "before": before,
        }
        if turn == last:
            task.kernel_into(result[:, first:end], members, divisor=task.divisor, **how)
        else:
            alone = not turn and len(own) == 1 and own[0].dtype == task.partial
            part = contiguous(members[0]) if alone else task.kernel(members, final=False, **how)
            sent.append(spread.exchange([(part, chain[turn + 1])], []))
            if len(sent) > AHEAD:
                sent.popleft().wait()
        delivery.step(number)
    for pending in sent:
        pending.wait()
    delivery.finish()
    return out


class _Delivery:
    """The results of a chain's last instance on their way to the first, the second, and so on."""

    def __init__(
        self, task: Task, chain: Sequence[int], result: Array, blocks: list[tuple[int, int]]
    ) -> None:
        self.spread, self.result, self.blocks = task.spread, result, blocks
        turn, count = chain.index(task.spread.own), len(chain)
        self.source = None if turn == count - 1 else chain[turn - 1]
        forward = (turn + 1) % count
        self.target = None if forward == count - 1 else chain[forward]
        # A block has been through the chain when so many more have begun.
        self.lag = 0 if self.source is None else count
        self.coming: deque[tuple[Array, Pending]] = deque()
        self.asked = 0
        self.done = 0
        self.sent: list[Pending] = []

    def step(self, number: int) -> None:
        """Pass on what is due when this instance has done its part of a block."""
        self._ask(number + AHEAD)
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
            buffer = target if contiguous else np.empty_like(target, order="C")
            pending = self.spread.exchange([], [(buffer, self.source)], results=True)
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
                part[...] = buffer
            part = buffer
        if self.target is not None:
            sent = contiguous(part)
            self.sent.append(self.spread.exchange([(sent, self.target)], [], results=True))
