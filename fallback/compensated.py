"""The compensated orders: linear sums that keep what each addition loses, and add it again.

docs/numerics.md, "Compensated sums", has every operation and its rounding. The compensation is of
the accumulator's format, as the sum is. One that is not finite counts as +0, so that infinities and
overflows give what a linear sum gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arithmetic import Arithmetic
from .jobs import FoldJob
from .orders import KAHAN
from .workspace import Workspace

Block = NDArray[Any]
#: Gives a member's block in the computing type, and the buffer to give back (None: it has none).
Load = Callable[[int], tuple[Block, Block | None]]


def fold_compensated(job: FoldJob) -> None:
    """Fold a box, with two accumulators and a few blocks of scratch memory."""

    def load(member: int) -> tuple[Block, Block | None]:
        block, buffer, _ = job.operand(member)
        return block, buffer

    total = compensated_sum(
        str(job.order), load, job.members.count, job.shape, job.arithmetic, job.workspace
    )
    job.finish(total)
    job.give(total)


def compensated_sum(
    order: str,
    load: Load,
    count: int,
    shape: tuple[int, ...],
    arithmetic: Arithmetic,
    workspace: Workspace,
) -> Block:
    """The sum of two or more members, in a buffer of the workspace.

    **Arguments**:

    - `order`: one of `orders.COMPENSATED`.
    - `load`: gives a member's block.
    - `count`, `shape`: of members, and of their blocks.
    - `arithmetic`: whose accumulator all operations round to.
    """
    chain = _Chain(load, count, shape, arithmetic, workspace)
    # Once it is not finite, a sum stays so, and so does the result: masks are then needed.
    for masks in (False, True):
        total = chain.kahan(masks) if order == KAHAN else chain.neumaier(masks)
        if masks or np.isfinite(total).all():
            break
        workspace.give(total)
    return total


class _Chain:
    """The members of one box, one after the other."""

    def __init__(
        self,
        load: Load,
        count: int,
        shape: tuple[int, ...],
        arithmetic: Arithmetic,
        workspace: Workspace,
    ) -> None:
        self.load, self.count, self.shape = load, count, shape
        self.arithmetic, self.workspace = arithmetic, workspace

    def take(self) -> Block:
        return self.workspace.take(self.arithmetic.computing, self.shape)

    def first(self) -> tuple[Block, Block]:
        """The first member, and a compensation of +0."""
        total, lost = self.take(), self.take()
        block, buffer = self.load(0)
        total[...] = block
        lost[...] = 0
        self.give(buffer)
        return total, lost

    def give(self, *buffers: Block | None) -> None:
        for buffer in buffers:
            if buffer is not None:
                self.workspace.give(buffer)

    def round(self, block: Block) -> None:
        """Round an operation's results to the accumulator, to nearest."""
        self.arithmetic.round_step(block, 0, None, self.workspace)

    def add(self, left: Block, right: Block, out: Block) -> None:
        np.add(left, right, out=out)
        self.round(out)

    def subtract(self, left: Block, right: Block, out: Block) -> None:
        np.subtract(left, right, out=out)
        self.round(out)

    def kahan(self, masks: bool) -> Block:
        total, lost = self.first()
        term, following = self.take(), self.take()
        for member in range(1, self.count):
            block, buffer = self.load(member)
            self.subtract(block, lost, term)
            self.give(buffer)
            self.add(total, term, following)
            self.subtract(following, total, lost)
            self.subtract(lost, term, lost)
            if masks:
                lost[~np.isfinite(lost)] = 0
            total, following = following, total
        self.give(lost, term, following)
        return total

    def neumaier(self, masks: bool) -> Block:
        total, lost = self.first()
        error, small, following = self.take(), self.take(), self.take()
        bits = np.dtype(f"u{total.itemsize}")
        mask = self.workspace.take(bits, self.shape)
        large_bits, small_bits = error.view(bits), small.view(bits)
        for member in range(1, self.count):
            block, buffer = self.load(member)
            self.add(total, block, following)
            np.abs(total, out=error)
            np.abs(block, out=small)
            np.greater_equal(error, small, out=mask)
            # By bits, as NumPy's choices take ten times as long: `error` is now the larger operand.
            np.negative(mask, out=mask)
            np.bitwise_xor(total.view(bits), block.view(bits), out=small_bits)
            np.bitwise_and(small_bits, mask, out=large_bits)
            np.bitwise_xor(large_bits, block.view(bits), out=large_bits)
            np.bitwise_xor(small_bits, large_bits, out=small_bits)
            self.subtract(error, following, error)
            self.add(error, small, error)
            self.give(buffer)
            self.add(lost, error, lost)
            if masks:
                lost[~np.isfinite(lost)] = 0
            total, following = following, total
        self.add(total, lost, following)
        np.copyto(following, total, where=lost == 0)  # -0 stays
        self.give(total, lost, error, small, mask)
        return following
