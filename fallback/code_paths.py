"""The two code paths that fold a box: member by member, or vectorised over many small members.
Both follow the same order and give the same bits; the second makes fewer NumPy calls."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .compensated import fold_compensated
from .decode import decode, decode_all
from .exact import fold_exact
from .jobs import FoldJob, Kernel, Operand
from .orders import COMPENSATED, EXACT, visits
from .rings import load_ring
from .running import reduce_rows
from .schedules import ChainSchedule, CompiledOrder, GraphSchedule, ReductionGraph
from .wide import add_wide


def by_member(order: CompiledOrder) -> Kernel:
    """The code path with a few NumPy calls per member, for boxes of thousands of elements."""
    if order == "tree":
        return _tree_by_member
    if order in COMPENSATED:
        return fold_compensated
    graphs = isinstance(order, ReductionGraph | GraphSchedule)
    return _graph_by_member if graphs else _sequence_by_member


def _sequence_by_member(job: FoldJob) -> None:
    if isinstance(job.order, ChainSchedule):
        visited = visits("ring", job.members.count, job.block.start, job.order.step)
    else:
        visited = visits(str(job.order), job.members.count, job.block.start)
    if job.earlier is None:
        left, held, bound = job.operand(next(visited))
    else:
        earlier = job.earlier.block(0, job.block.box)
        left, held, bound = job.arithmetic.operand(earlier, job.workspace)
    if job.arithmetic.direct:
        partial = job.out
    elif held is None:
        held = partial = job.workspace.take(job.arithmetic.computing, job.shape)
    else:
        partial = held
    if job.plan.folded == 1 and partial is not left:
        partial[...] = left
    for step, member in enumerate(visited, max(job.plan.extent.before, 1)):
        right, buffer, reach = job.operand(member)
        bound = job.add(left, right, partial, step, bound, reach)
        left = partial
        job.give(buffer)
    job.finish(partial, bound)
    job.give(held)


def _tree_by_member(job: FoldJob) -> None:
    """Depth first, so that only one partial result per level is alive."""
    count, computing = job.members.count, job.arithmetic.computing
    steps, top = job.tree_steps(), (count - 1).bit_length()

    def node(level: int, index: int) -> Operand:
        """The fold of members index * 2**level and on, the buffer that holds it, and a bound."""
        if not level:
            return job.operand(index)
        left, held, bound = node(level - 1, 2 * index)
        if (2 * index + 1) << (level - 1) >= count:
            return left, held, bound
        right, buffer, reach = node(level - 1, 2 * index + 1)
        out = job.workspace.take(computing, job.shape) if held is None else held
        bound = job.combine(left, right, out, steps[level - 1] + index + 1, bound + reach)
        job.give(buffer)
        return out, out, bound

    result, held, bound = node(top, 0)
    if held is None:  # a single member, seen but not copied
        held = job.workspace.take(computing, job.shape)
        held[...] = result
    job.finish(held, bound)
    job.give(held)


def _graph_by_member(job: FoldJob) -> None:
    """Each addition once its operands are there."""
    graph = job.order
    if isinstance(graph, GraphSchedule):
        graph = graph.graphs[job.block.start]
    assert isinstance(graph, ReductionGraph)
    stack: list[Operand] = []
    for instruction in graph.postfix:
        if instruction >= 0:
            stack.append(job.operand(instruction))
            continue
        if graph.adders and (adder := graph.adders[-instruction - 1]) is not None:
            terms = len(graph.additions[-instruction - 1])
            total = add_wide(job, adder, [term for term, _, _ in stack[-terms:]])
            for _, buffer, _ in stack[-terms:]:
                job.give(buffer)
            stack[-terms:] = [(total, total, math.inf)]
            continue
        right, second, reach = stack.pop()
        left, first, bound = stack.pop()
        out = first if first is not None else second
        if out is None:
            out = job.workspace.take(job.arithmetic.computing, job.shape)
        stack.append((out, out, job.combine(left, right, out, -instruction, bound + reach)))
        if out is not second:
            job.give(second)
    _, held, bound = stack.pop()
    assert held is not None
    job.finish(held, bound)
    job.give(held)


def vectorised(order: CompiledOrder, running: tuple[np.ufunc, np.dtype[Any]] | None) -> Kernel:
    """The code path that stacks the blocks of many members and folds them chunk by chunk."""
    if order == EXACT:
        return fold_exact
    if order == "tree":
        return _tree_by_rows
    return _sequence_by_rows if running is None else _reduce_by_rows


def _load_rows(job: FoldJob, rows: NDArray[Any], first: int) -> float:
    """Write the blocks visited at turn `first` and on into `rows`; a bound of their magnitudes."""
    last = first + len(rows)
    if job.block.ring is not None:
        return load_ring(job.members, job.block.box, job.block.ring, rows, first, job.workspace)
    if job.block.rotation is not None:
        turns = np.arange(first, last).reshape(-1, *(1 for _ in job.block.box))
        step = job.order.step if isinstance(job.order, ChainSchedule) else 1
        chosen = (job.block.rotation + step * turns) % job.members.count
        return decode(job.members.gather(chosen, job.block.box), rows)
    return decode_all(job.members.rows(_visited(job, first, last), job.block.box), rows)


def _visited(job: FoldJob, first: int, last: int) -> slice:
    """The members visited at turns first..last-1 of the orders that begin at an end."""
    if job.order != "reverse":
        return slice(first, last)
    stop = job.members.count - 1 - last
    return slice(job.members.count - 1 - first, None if stop < 0 else stop, -1)


def _reduce_by_rows(job: FoldJob) -> None:
    """All steps of a chunk in one call; all members are one chunk if none is converted."""
    block, plan, out, members = job.block, job.plan, job.out, job.members
    assert block.running is not None
    ufunc, dtype = block.running
    direct = block.keeps and out.flags.c_contiguous
    partial = out if direct else job.workspace.take(dtype, out.shape)
    reduced = False
    if block.rows is not None:
        reduced = reduce_rows(ufunc, members.arrays[block.rows], partial)
    if not reduced:
        job.begin(partial)
        chunk = max(1, job.workspace.capacity // (2 * partial.size) - 1)
        for first in range(0, plan.count, chunk):
            # The first row is what has been folded so far.
            held = bool(plan.extent.before + first)
            number = min(chunk, plan.count - first) + held
            rows = job.workspace.take(dtype, (number, *job.shape))
            _load_rows(job, rows[1:] if held else rows, first)
            if held:
                rows[0] = partial
            reduce_rows(ufunc, rows, partial)
            job.give(rows)
    if direct:
        return
    if block.keeps:
        out[...] = partial
    else:
        job.finish(partial.astype(job.arithmetic.computing, copy=False))
    job.give(partial)


def _sequence_by_rows(job: FoldJob) -> None:
    arithmetic, count = job.arithmetic, job.members.count
    partial = job.workspace.take(arithmetic.computing, job.shape)
    chunk = max(1, job.workspace.capacity // (2 * partial.size))
    bound = job.begin(partial)
    for first in range(0, count, chunk):
        number = min(chunk, count - first)
        buffer = job.workspace.take(arithmetic.computing, (number, *job.shape))
        bound = _add_rows(job, partial, buffer, first, bound)
        job.give(buffer)
    job.finish(partial, bound)
    job.give(partial)


def _add_rows(
    job: FoldJob, partial: NDArray[Any], rows: NDArray[Any], first: int, bound: float
) -> float:
    """Fill `rows` with what is visited at turn `first` and on, and add them."""
    reach = _load_rows(job, rows, first)
    next_step = job.plan.extent.before + first
    if not next_step:
        partial[...] = rows[0]
        rows, next_step, bound = rows[1:], 1, reach
    added = job.arithmetic.add_rows(partial, rows, bound, reach, job.workspace)
    if added is not None:
        return added
    for step, row in enumerate(rows, next_step):
        bound = job.combine(partial, row, partial, step, bound + reach)
    return bound


def _tree_by_rows(job: FoldJob) -> None:
    """Aligned chunks of a power of two of members are subtrees; their results are the next rows."""
    count, shape, steps = job.members.count, job.shape, job.tree_steps()
    width = job.out.size
    level = max(0, (job.workspace.capacity // (2 * width)).bit_length() - 1)
    chunk = 1 << level
    partials = np.empty((-(-count // chunk), *shape), job.arithmetic.computing)
    for index in range(len(partials)):
        first = index * chunk
        number = min(chunk, count - first)
        rows = job.workspace.take(job.arithmetic.computing, (number, *shape))
        reach = _load_rows(job, rows, first)
        partials[index] = _climb(job, rows, steps, 0, first, reach)
        job.give(rows)
    block = _climb(job, partials, steps, level, 0, math.inf)
    job.finish(block)


def _climb(
    job: FoldJob, rows: NDArray[Any], steps: list[int], level: int, first: int, bound: float
) -> NDArray[Any]:
    """The fold of the subtree over `rows`: nodes first, first + 1, ... of `level`."""
    while len(rows) > 1:
        pairs, odd = divmod(len(rows), 2)
        first //= 2
        above = np.empty((pairs + odd, *job.shape), rows.dtype)
        bound = job.combine(
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
