"""A block of a fold, and one fold of it: what the code paths work on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import limits
from .decode import decode
from .draws import Draws
from .layout import Index
from .members import Members
from .orders import tree_levels
from .plan import FoldPlan
from .rings import Ring
from .workspace import own_workspace

Operand = tuple[NDArray[Any], NDArray[Any] | None, float]  # its buffer, and a bound
Kernel = Callable[["FoldJob"], None]


@dataclass(frozen=True, eq=False)
class Block:
    """A box of a fold, and how it is folded.

    **Attributes**:

    - `kernel`: the code path.
    - `start`: the member at which a ring's block begins, or the number of the block's graph, for
      the path member by member.
    - `ring`, `rotation`: for the vectorised path, which of a ring's blocks the box holds, or for
      each element the member at which its block begins (it broadcasts against the box).
    - `running`: the ufunc that does all steps in one call, with its dtype.
    - `keeps`: whether that ufunc gives the result as it is to be stored.
    - `rows`: the index of the members' rows in the box, in the order in which they are visited,
      where that ufunc can read them where they lie; None: they are copied first.
    """

    kernel: Kernel
    box: Index
    start: int = 0
    ring: Ring | None = None
    rotation: NDArray[np.intp] | None = None
    running: tuple[np.ufunc, np.dtype[Any]] | None = None
    keeps: bool = False
    rows: tuple[slice, ...] | None = None


class FoldJob:
    """One block of one fold.

    `earlier` holds the result of the members visited before, as its only member.
    """

    def __init__(
        self,
        plan: FoldPlan,
        block: Block,
        members: Members,
        earlier: Members | None,
        out: NDArray[Any],
        draws: Draws | None,
    ) -> None:
        self.plan, self.arithmetic, self.order = plan, plan.arithmetic, plan.order
        self.block, self.members, self.earlier = block, members, earlier
        self.out, self.draws = out, draws
        self.workspace = own_workspace(limits.BLOCK)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.out.shape

    def operand(self, member: int) -> Operand:
        return self.arithmetic.operand(self.members.block(member, self.block.box), self.workspace)

    def combine(
        self,
        left: NDArray[Any],
        right: NDArray[Any],
        out: NDArray[Any],
        step: int,
        bound: float = math.inf,
    ) -> float:
        """One addition and its rounding; `out` may hold several boxes, of `step` and later ones.

        `bound` bounds the magnitudes of sums. Returns a bound of the rounded magnitudes.
        """
        self.arithmetic.operator(left, right, out)
        return self.arithmetic.round_step(out, step, self.draws, self.workspace, bound)

    def add(
        self,
        left: NDArray[Any],
        right: NDArray[Any],
        out: NDArray[Any],
        step: int,
        bound: float,
        reach: float,
    ) -> float:
        """`combine`, in fewer calls if `left` is `out`; takes bounds of left and right."""
        if left is out:
            added = self.arithmetic.add_rows(out, (right,), bound, reach, self.workspace)
            if added is not None:
                return added
        return self.combine(left, right, out, step, bound + reach)

    def tree_steps(self) -> list[int]:
        """The step before that of each level's first node above the members."""
        nodes = self.plan.tree
        bases = tree_levels(nodes.total)[nodes.level :]
        return [base + (nodes.first >> level) for level, base in enumerate(bases, 1)]

    def give(self, buffer: NDArray[Any] | None) -> None:
        if buffer is not None:
            self.workspace.give(buffer)

    def begin(self, block: NDArray[Any]) -> float:
        """Write the partial result that comes in into `block`; a bound of its magnitudes."""
        if self.earlier is None:
            return math.inf
        return decode(self.earlier.block(0, self.block.box), block)

    def finish(self, block: NDArray[Any], bound: float = math.inf) -> None:
        count = self.plan.folded
        self.arithmetic.finish(block, self.out, count, self.draws, self.workspace, bound)
