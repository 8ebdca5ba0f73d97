"""The two ways to fold one box: member by member, or many small members at a time.
Both follow the same order and give the same bits; the second spares NumPy calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fallback import limits
from fallback.arithmetic import Arithmetic
from fallback.decode import decode
from fallback.draws import Draws
from fallback.layout import Index, box_shape
from fallback.members import Members
from fallback.orders import tree_levels, visits
from fallback.workspace import Workspace


@dataclass
class Task:
    """One box of one fold, with all that is needed to do it.

    `start` is the member at which a ring's block begins; `rotation`, for the second way only, says
    it for every element and broadcasts against the box.
    """

    members: Members
    order: str
    arithmetic: Arithmetic
    box: Index
    out: NDArray[Any]
    workspace: Workspace
    draws: Draws | None
    start: int = 0
    rotation: NDArray[np.intp] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return box_shape(self.box)

    def operand(self, member: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        return self.arithmetic.operand(self.members.block(member, self.box), self.workspace)

    def combine(
        self, left: NDArray[Any], right: NDArray[Any], out: NDArray[Any], step: int
    ) -> None:
        """One addition and its rounding; `out` may hold several boxes, of `step` and later ones."""
        self.arithmetic.operator(left, right, out)
        self.arithmetic.round_step(out, step, self.draws, self.workspace)

    def give(self, buffer: NDArray[Any] | None) -> None:
        if buffer is not None:
            self.workspace.give(buffer)

    def finish(self, block: NDArray[Any]) -> None:
        self.arithmetic.finish(block, self.out, self.members.count, self.draws, self.workspace)


def by_member(task: Task) -> None:
    """Fold the box with a handful of NumPy calls per member; for boxes of thousands of elements."""
    if task.order == "tree":
        _tree_by_member(task)
    else:
        _sequence_by_member(task)


def _sequence_by_member(task: Task) -> None:
    direct = task.arithmetic.direct
    partial = task.out if direct else task.workspace.take(task.arithmetic.computing, task.shape)
    visited = visits(task.order, task.members.count, task.start)
    left, held = task.operand(next(visited))
    if task.members.count == 1:
        partial[...] = left
    for step, member in enumerate(visited, 1):
        right, buffer = task.operand(member)
        task.combine(left, right, partial, step)
        left = partial
        task.give(buffer)
    task.give(held)
    task.finish(partial)
    task.give(None if direct else partial)


def _tree_by_member(task: Task) -> None:
    """Depth first, so that only one partial result a level is alive."""
    bases = tree_levels(task.members.count)
    count, computing = task.members.count, task.arithmetic.computing

    def node(level: int, index: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """The fold of members index * 2**level and on, and the buffer that holds it."""
        if not level:
            return task.operand(index)
        left, held = node(level - 1, 2 * index)
        if (2 * index + 1) << (level - 1) >= count:
            return left, held
        right, buffer = node(level - 1, 2 * index + 1)
        out = task.workspace.take(computing, task.shape) if held is None else held
        task.combine(left, right, out, bases[level - 1] + index + 1)
        task.give(buffer)
        return out, out

    result, held = node(len(bases) - 1, 0)
    if held is None:  # a single member, seen but not copied
        held = task.workspace.take(computing, task.shape)
        held[...] = result
    task.finish(held)
    task.give(held)


def by_rows(task: Task) -> None:
    """Fold the box from chunks of many members' blocks, one below the other."""
    if task.order == "tree":
        _tree_by_rows(task)
    else:
        _sequence_by_rows(task)


def _load_rows(task: Task, first: int, last: int) -> NDArray[Any]:
    """The blocks visited at turns first..last-1 of the order, in the computing type."""
    rows = task.workspace.take(task.arithmetic.computing, (last - first, *task.shape))
    if task.rotation is not None:
        turns = np.arange(first, last).reshape(-1, *(1 for _ in task.box))
        chosen = (task.rotation + turns) % task.members.count
        decode(task.members.gather(chosen, task.box), rows)
        return rows
    visited = slice(first, last)
    if task.order == "reverse":
        stop = task.members.count - 1 - last
        visited = slice(task.members.count - 1 - first, None if stop < 0 else stop, -1)
    blocks = task.members.rows(visited, task.box)
    if isinstance(blocks, np.ndarray):
        decode(blocks, rows)
    else:
        for block, row in zip(blocks, rows, strict=True):
            decode(block, row)
    return rows


def _sequence_by_rows(task: Task) -> None:
    arithmetic, count = task.arithmetic, task.members.count
    partial = task.workspace.take(arithmetic.computing, task.shape)
    chunk = task.workspace.capacity // partial.size
    running = arithmetic.running if partial.size < limits.ACCUMULATE_WIDTH else None
    add = _accumulating(running) if running else _one_by_one
    for first in range(0, count, chunk):
        rows = _load_rows(task, first, min(first + chunk, count))
        add(task, partial, rows, first)
        task.give(rows)
    task.finish(partial)
    task.give(partial)


def _one_by_one(task: Task, partial: NDArray[Any], rows: NDArray[Any], first: int) -> None:
    for step, row in enumerate(rows, first):
        if step:
            task.combine(partial, row, partial, step)
        else:
            partial[...] = row


def _accumulating(
    ufunc: np.ufunc,
) -> Callable[[Task, NDArray[Any], NDArray[Any], int], None]:
    """`accumulate` is sequential by definition, and nothing is rounded between the additions."""

    def add(task: Task, partial: NDArray[Any], rows: NDArray[Any], first: int) -> None:
        if first:
            ufunc(partial, rows[0], out=rows[0])
        ufunc.accumulate(rows, axis=0, out=rows)
        partial[...] = rows[-1]

    return add


def _tree_by_rows(task: Task) -> None:
    """Aligned chunks of a power of two of members are subtrees; their results are the next rows."""
    count, shape = task.members.count, task.shape
    bases = tree_levels(count)
    width = task.out.size
    level = max(0, (task.workspace.capacity // width).bit_length() - 1)
    chunk = 1 << level
    partials = np.empty((-(-count // chunk), *shape), task.arithmetic.computing)
    for index in range(len(partials)):
        first = index * chunk
        rows = _load_rows(task, first, min(first + chunk, count))
        partials[index] = _climb(task, rows, bases, 0, first)
        task.give(rows)
    block = _climb(task, partials, bases, level, 0)
    task.finish(block)


def _climb(
    task: Task, rows: NDArray[Any], bases: list[int], level: int, first: int
) -> NDArray[Any]:
    """The fold of the subtree over `rows`: nodes first, first + 1, ... of `level`."""
    while len(rows) > 1:
        pairs, odd = divmod(len(rows), 2)
        first //= 2
        above = np.empty((pairs + odd, *task.shape), rows.dtype)
        task.combine(
            rows[0 : 2 * pairs : 2],
            rows[1 : 2 * pairs : 2],
            above[:pairs],
            bases[level] + first + 1,
        )
        if odd:
            above[-1] = rows[-1]
        rows, level = above, level + 1
    result: NDArray[Any] = rows[0]
    return result
