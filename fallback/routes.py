"""The two ways to fold one box: member by member, or many small members at a time.
Both follow the same order and give the same bits; the second spares NumPy calls."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fallback.arguments import Share
from fallback.arithmetic import Arithmetic
from fallback.decode import decode, decode_all
from fallback.draws import Draws
from fallback.layout import Index, box_shape
from fallback.members import Members
from fallback.orders import tree_levels, visits
from fallback.rings import Ring, load_ring
from fallback.running import reduce_rows, rows_of
from fallback.schedules import Program, Walks
from fallback.workspace import Workspace

Operand = tuple[NDArray[Any], NDArray[Any] | None, float]  # its buffer, and a bound


@dataclass
class Task:
    """One box of one fold, with all that is needed to do it.

    `share` says which of a fold's members these are, and `earlier` has the result of those visited
    before, as its only member.
    `start` is the member at which a ring's block begins. For the second way `ring` says which of
    a ring's blocks the box holds, or `rotation` where each element's begins (it broadcasts against
    the box).
    """

    members: Members
    order: str | Walks | Program
    arithmetic: Arithmetic
    box: Index
    out: NDArray[Any]
    workspace: Workspace
    draws: Draws | None
    share: Share
    earlier: Members | None = None
    start: int = 0
    ring: Ring | None = None
    rotation: NDArray[np.intp] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return box_shape(self.box)

    def operand(self, member: int) -> Operand:
        return self.arithmetic.operand(self.members.block(member, self.box), self.workspace)

    def combine(
        self,
        left: NDArray[Any],
        right: NDArray[Any],
        out: NDArray[Any],
        step: int,
        bound: float = math.inf,
    ) -> float:
        """One addition and its rounding; `out` may hold several boxes, of `step` and later ones.

        `bound` is one of the magnitudes of sums, what is returned one of the rounded ones.
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
        """`combine`, in fewer calls where `left` is `out`; bounds of left and right."""
        if left is out:
            added = self.arithmetic.add_rows(out, (right,), bound, reach, self.workspace)
            if added is not None:
                return added
        return self.combine(left, right, out, step, bound + reach)

    def tree_steps(self) -> list[int]:
        """The step before that of each level's first node above the members."""
        nodes = self.share.tree
        bases = tree_levels(nodes.total)[nodes.level :]
        return [base + (nodes.first >> level) for level, base in enumerate(bases, 1)]

    def give(self, buffer: NDArray[Any] | None) -> None:
        if buffer is not None:
            self.workspace.give(buffer)

    def begin(self, block: NDArray[Any]) -> float:
        """Write the partial result that comes in into `block`; a bound of its magnitudes."""
        return math.inf if self.earlier is None else decode(self.earlier.block(0, self.box), block)

    def finish(self, block: NDArray[Any], bound: float = math.inf) -> None:
        count = self.share.total
        self.arithmetic.finish(block, self.out, count, self.draws, self.workspace, bound)


def by_member(task: Task) -> None:
    """Fold the box with a handful of NumPy calls per member; for boxes of thousands of elements."""
    if task.order == "tree":
        _tree_by_member(task)
    elif isinstance(task.order, Program):
        _program_by_member(task, task.order)
    else:
        _sequence_by_member(task)


def _sequence_by_member(task: Task) -> None:
    if isinstance(task.order, Walks):
        visited = visits("ring", task.members.count, task.start, task.order.step)
    else:
        visited = visits(str(task.order), task.members.count, task.start)
    if task.earlier is None:
        left, held, bound = task.operand(next(visited))
    else:
        earlier = task.earlier.block(0, task.box)
        left, held, bound = task.arithmetic.operand(earlier, task.workspace)
    if task.arithmetic.direct:
        partial = task.out
    elif held is None:
        held = partial = task.workspace.take(task.arithmetic.computing, task.shape)
    else:
        partial = held
    if task.share.total == 1 and partial is not left:
        partial[...] = left
    for step, member in enumerate(visited, max(task.share.before, 1)):
        right, buffer, reach = task.operand(member)
        bound = task.add(left, right, partial, step, bound, reach)
        left = partial
        task.give(buffer)
    task.finish(partial, bound)
    task.give(held)


def _tree_by_member(task: Task) -> None:
    """Depth first, so that only one partial result a level is alive."""
    count, computing = task.members.count, task.arithmetic.computing
    steps, top = task.tree_steps(), (count - 1).bit_length()

    def node(level: int, index: int) -> Operand:
        """The fold of members index * 2**level and on, the buffer that holds it, and a bound."""
        if not level:
            return task.operand(index)
        left, held, bound = node(level - 1, 2 * index)
        if (2 * index + 1) << (level - 1) >= count:
            return left, held, bound
        right, buffer, reach = node(level - 1, 2 * index + 1)
        out = task.workspace.take(computing, task.shape) if held is None else held
        bound = task.combine(left, right, out, steps[level - 1] + index + 1, bound + reach)
        task.give(buffer)
        return out, out, bound

    result, held, bound = node(top, 0)
    if held is None:  # a single member, seen but not copied
        held = task.workspace.take(computing, task.shape)
        held[...] = result
    task.finish(held, bound)
    task.give(held)


def _program_by_member(task: Task, program: Program) -> None:
    """Each addition once its operands are there."""
    stack: list[Operand] = []
    for instruction in program.postfix:
        if instruction >= 0:
            stack.append(task.operand(instruction))
            continue
        right, second, reach = stack.pop()
        left, first, bound = stack.pop()
        out = first if first is not None else second
        if out is None:
            out = task.workspace.take(task.arithmetic.computing, task.shape)
        stack.append((out, out, task.combine(left, right, out, -instruction, bound + reach)))
        if out is not second:
            task.give(second)
    _, held, bound = stack.pop()
    assert held is not None
    task.finish(held, bound)
    task.give(held)


def by_rows(task: Task) -> None:
    """Fold the box from chunks of many members' blocks, one below the other."""
    running = task.arithmetic.running(task.out.size)
    if task.order == "tree":
        _tree_by_rows(task)
    elif running is None:
        _sequence_by_rows(task)
    else:
        _run_down_rows(task, *running)


def _load_rows(task: Task, rows: NDArray[Any], first: int) -> float:
    """Write the blocks visited at turn `first` and on into `rows`; a bound of their magnitudes."""
    last = first + len(rows)
    if task.ring is not None:
        return load_ring(task.members, task.box, task.ring, rows, first, task.workspace)
    if task.rotation is not None:
        turns = np.arange(first, last).reshape(-1, *(1 for _ in task.box))
        step = task.order.step if isinstance(task.order, Walks) else 1
        chosen = (task.rotation + step * turns) % task.members.count
        return decode(task.members.gather(chosen, task.box), rows)
    return decode_all(task.members.rows(_visited(task, first, last), task.box), rows)


def _visited(task: Task, first: int, last: int) -> slice:
    """The members visited at turns first..last-1 of the orders that begin at an end."""
    if task.order != "reverse":
        return slice(first, last)
    stop = task.members.count - 1 - last
    return slice(task.members.count - 1 - first, None if stop < 0 else stop, -1)


def _run_down_rows(task: Task, ufunc: np.ufunc, dtype: np.dtype[Any]) -> None:
    """All steps of a chunk in one call, and of all members where nothing has to be converted."""
    count = task.members.count
    partial = task.workspace.take(dtype, task.shape)
    task.begin(partial)
    plain = task.ring is None and task.rotation is None and task.earlier is None
    as_they_are = plain and task.members.dtype == dtype
    rows = task.members.rows(_visited(task, 0, count), task.box) if as_they_are else None
    flat = None if rows is None else rows_of(rows)
    if flat is not None:
        reduce_rows(ufunc, flat, partial.reshape(-1))
    else:
        chunk = max(1, task.workspace.capacity // (2 * partial.size) - 1)
        for first in range(0, count, chunk):
            # The first row is what has been folded so far.
            held = bool(task.share.before + first)
            number = min(chunk, count - first) + held
            rows = task.workspace.take(dtype, (number, *task.shape))
            _load_rows(task, rows[1:] if held else rows, first)
            if held:
                rows[0] = partial
            reduce_rows(ufunc, rows.reshape(number, -1), partial.reshape(-1))
            task.give(rows)
    if task.arithmetic.holds_result(dtype):
        task.out[...] = partial
    else:
        block = partial.astype(task.arithmetic.computing, copy=False)
        task.finish(block)
    task.give(partial)


def _sequence_by_rows(task: Task) -> None:
    arithmetic, count = task.arithmetic, task.members.count
    partial = task.workspace.take(arithmetic.computing, task.shape)
    chunk = max(1, task.workspace.capacity // (2 * partial.size))
    bound = task.begin(partial)
    for first in range(0, count, chunk):
        number = min(chunk, count - first)
        buffer = task.workspace.take(arithmetic.computing, (number, *task.shape))
        bound = _add_rows(task, partial, buffer, first, bound)
        task.give(buffer)
    task.finish(partial, bound)
    task.give(partial)


def _add_rows(
    task: Task, partial: NDArray[Any], rows: NDArray[Any], first: int, bound: float
) -> float:
    """Fill `rows` with what is visited at turn `first` and on, and add them."""
    reach = _load_rows(task, rows, first)
    next_step = task.share.before + first
    if not next_step:
        partial[...] = rows[0]
        rows, next_step, bound = rows[1:], 1, reach
    added = task.arithmetic.add_rows(partial, rows, bound, reach, task.workspace)
    if added is not None:
        return added
    for step, row in enumerate(rows, next_step):
        bound = task.combine(partial, row, partial, step, bound + reach)
    return bound


def _tree_by_rows(task: Task) -> None:
    """Aligned chunks of a power of two of members are subtrees; their results are the next rows."""
    count, shape, steps = task.members.count, task.shape, task.tree_steps()
    width = task.out.size
    level = max(0, (task.workspace.capacity // (2 * width)).bit_length() - 1)
    chunk = 1 << level
    partials = np.empty((-(-count // chunk), *shape), task.arithmetic.computing)
    for index in range(len(partials)):
        first = index * chunk
        number = min(chunk, count - first)
        rows = task.workspace.take(task.arithmetic.computing, (number, *shape))
        reach = _load_rows(task, rows, first)
        partials[index] = _climb(task, rows, steps, 0, first, reach)
        task.give(rows)
    block = _climb(task, partials, steps, level, 0, math.inf)
    task.finish(block)


def _climb(
    task: Task, rows: NDArray[Any], steps: list[int], level: int, first: int, bound: float
) -> NDArray[Any]:
    """The fold of the subtree over `rows`: nodes first, first + 1, ... of `level`."""
    while len(rows) > 1:
        pairs, odd = divmod(len(rows), 2)
        first //= 2
        above = np.empty((pairs + odd, *task.shape), rows.dtype)
        bound = task.combine(
            rows[0 : 2 * pairs : 2],
            rows[1 : 2 * pairs : 2],
            above[:pairs],
            steps[level] + first + 1,
            2 * bound,
        )
        if odd:
            above[-1], bound = rows[-1], math.inf
        rows, level = above, level + 1
    result: NDArray[Any] = rows[0]
    return result
