"""How the NumPy kernels lay out a fold and cut it into blocks that do not depend on each other.
Blocks depend on shapes, strides and the sizes in `limits`; the bits do not depend on the blocks."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import code_paths, kernels, limits, threads
from .fold_kernels import FoldKernel, compiled_folds
from .formats import real_of
from .jobs import Block
from .layout import Index, coalesce, flat_range, split, whole
from .operators import LOGICAL_OPS
from .orders import COMPENSATED, EXACT, ring_bounds
from .plan import FoldPlan, plan_fold
from .rings import ring_runs
from .schedules import ChainSchedule, GraphSchedule, ReductionGraph
from .spec import Extent, FoldSpec

Strides = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ElementLayout:
    """The axes of a member once merged: batch entries, the value, and (complex only) two parts.

    **Attributes**:

    - `cut`: the value axis whose positions are a ring's blocks.
    - `window`: the index of the first element held, and the number of elements of the whole value.
    """

    batch: tuple[int, ...]
    value: tuple[int, ...]
    parts: tuple[int, ...]
    cut: int | None
    window: tuple[int, int] | None

    @property
    def first(self) -> int:
        """The index, in the whole value, of the first element that is held."""
        return self.window[0] if self.window else 0

    @property
    def total(self) -> int:
        """The number of elements of the whole value."""
        return self.window[1] if self.window else self.held

    @property
    def held(self) -> int:
        """The number of elements of the value that the members hold."""
        return math.prod(self.value)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch + self.value + self.parts

    def around(self, box: Index) -> Index:
        """A box of the value, for all batch entries and both parts."""
        return (*whole(self.batch), *box, *whole(self.parts))

    def value_box(self, box: Index) -> Index:
        """The part of a box of everything that lies along the value's axes."""
        return box[len(self.batch) : len(self.batch) + len(self.value)]


class BlockPlan:
    """A FoldPlan for NumPy members of certain strides: layout, code path and blocks.

    **Attributes**:

    - `shape`: the members' shape that the layout's axes are reached from.
    - `parts`: whether members are complex and are viewed as two reals each.
    - `compiled`: the compiled kernel that folds all, where there is one; the rest is not used then.
    - `vectorised`: whether members, or a ring's blocks of them, are many and small.
    - `blocks`: all blocks of a small fold. None if a fold is shared among threads; `cut_up` then
      cuts it for as many threads as there are.
    - `one_call`: the ufunc that folds all members in one call, into the output, and the index that
      puts them in the order of their visits. None: there is none, or no small fold.
    """

    def __init__(self, plan: FoldPlan, strides: Strides, stacked: bool) -> None:
        self.plan = plan
        self.arithmetic = plan.arithmetic
        self.parts = plan.dtype.kind == "c" and plan.spec.op not in LOGICAL_OPS
        self.stacked = stacked
        self.layout = _layout(plan, strides, self.parts)
        self.shape = self.layout.shape
        self.size = math.prod(self.shape)
        self.work = self.size * plan.count
        self.vectorised = self._is_vectorised()
        self.compiled = self._plan_compiled(strides)
        small = self.work < limits.SHARED_WORK
        self.blocks = tuple(self._cut_up(threads=1) if self.size else ()) if small else None
        self.one_call = self._one_call()

    def cut_up(self) -> Iterator[Block]:
        """The blocks of a fold that threads share."""
        return self._cut_up(threads.count())

    def _plan_compiled(self, strides: Strides) -> FoldKernel | None:
        compiled = compiled_folds()
        if compiled is None or not self.size or self.work < kernels.least_work():
            return None
        # A partial result's strides come last; it is copied where it is not contiguous.
        members = set(strides[:-1] if self.plan.extent.before else strides)
        if len(members) != 1:
            return None
        return compiled.plan_fold(self.plan, members.pop(), self.stacked)

    def _one_call(self) -> tuple[np.ufunc, slice] | None:
        if self.parts or self.blocks is None or len(self.blocks) != 1:
            return None
        (block,) = self.blocks
        if block.rows is None or block.running is None or not block.keeps:
            return None
        return block.running[0], block.rows[0]

    def _is_vectorised(self) -> bool:
        plan, width = self.plan, self.size
        if plan.order == EXACT:
            return True
        if isinstance(plan.order, ReductionGraph | GraphSchedule) or plan.order in COMPENSATED:
            return False
        if plan.in_blocks:
            blocks = len(plan.order.starts) if isinstance(plan.order, ChainSchedule) else plan.count
            width = min(width, width * self.layout.total // (max(1, self.layout.held) * blocks))
        # One call adds all rows, unless the first is a partial result, which lies elsewhere.
        one_call = plan.order != "tree" and self.arithmetic.running(width) is not None
        one_call = one_call and not plan.extent.before
        converts = self.arithmetic.converts
        few = limits.STACKED if self.stacked else 1
        if one_call and not converts and plan.count > 1 and width < few * limits.ROW_WIDTH:
            return True  # the fewest calls, for any number of members
        # Members in a list would be copied into rows first, as a ring's blocks are anyway.
        one_call = one_call and (self.stacked or plan.in_blocks)
        wider = limits.CONVERTED if converts else limits.RUNNING if one_call else 1
        return plan.count >= limits.ROW_MEMBERS and width < wider * limits.ROW_WIDTH

    def _cut_up(self, threads: int) -> Iterator[Block]:
        return self._rows(threads) if self.vectorised else self._boxes(threads)

    def _boxes(self, threads: int) -> Iterator[Block]:
        """Blocks for the code path member by member."""
        least = limits.SHARED_WIDTH
        if self.plan.extent.before and self.plan.count >= limits.ROW_MEMBERS:
            least *= 8  # many calls: in small boxes threads wait for the interpreter's lock
        kernel = code_paths.by_member(self.plan.order)
        most = limits.SENT_BLOCK if self.plan.order in COMPENSATED else limits.BLOCK
        for start, region in self._regions():
            for box in split(region, self._limit(most, least, threads)):
                yield Block(kernel, box, start)

    def _limit(self, most: int, least: int, threads: int) -> int:
        """How large boxes may be, for every thread to have one unless that makes them too small."""
        return min(most, max(-(-self.size // threads), least))

    def _regions(self) -> Iterator[tuple[int, Index]]:
        layout, value = self.layout, self.layout.value
        if not self.plan.in_blocks:
            yield 0, whole(self.shape)
        elif layout.cut is not None:
            axis = layout.cut
            for start in range(self.plan.count):
                box = (*whole(value[:axis]), slice(start, start + 1), *whole(value[axis + 1 :]))
                yield start, layout.around(box)
        else:
            bounds, starts = self._ring()
            first, last = layout.first, layout.first + layout.held
            for block in range(bisect_right(bounds, first) - 1, len(starts)):
                if bounds[block] >= last:
                    return
                low, high = max(bounds[block], first), min(bounds[block + 1], last)
                for box in flat_range(value, low - first, high - first):
                    yield starts[block], layout.around(box)

    def _ring(self) -> tuple[Sequence[int], Sequence[int]]:
        """The bounds of the flattened value's blocks, and the first member or the graph of each."""
        if isinstance(self.plan.order, ChainSchedule | GraphSchedule):
            return self.plan.order.edges, self.plan.order.starts
        return ring_bounds(self.layout.total, self.plan.count), range(self.plan.count)

    def _rows(self, threads: int) -> Iterator[Block]:
        """Blocks for the vectorised path: part of a buffer, so that a chunk has several rows."""
        limit = max(2, limits.BLOCK // 2)
        layout, plan = self.layout, self.plan
        if plan.order == EXACT:
            for box in split(whole(self.shape), limits.EXACT_BLOCK // 8):
                yield self._row_block(box)
        elif not plan.in_blocks:
            width = limits.SHARED_WIDTH
            if self.arithmetic.converts:
                limit, width = max(2, limit // 4), width // 4
            for box in split(whole(self.shape), self._limit(limit, width, threads)):
                yield self._row_block(box)
        elif plan.order == "ring" and len(self.shape) == 1 and layout.cut is None:
            last = layout.first + layout.held
            for ring, low, high in ring_runs(layout.total, plan.count, layout.first, last, limit):
                box = (slice(low - layout.first, high - layout.first),)
                yield self._row_block(box, ring=ring)
        else:
            limit = limit if self.stacked else max(2, limits.BLOCK // plan.count)
            for box in split(whole(self.shape), limit):
                yield self._row_block(box, rotation=self._rotation(box))

    def _row_block(self, box: Index, **start: Any) -> Block:
        size = math.prod(part.stop - part.start for part in box)
        running = None if self.plan.order in ("tree", EXACT) else self.arithmetic.running(size)
        kernel = code_paths.vectorised(self.plan.order, running)
        keeps = running is not None and self.arithmetic.keeps(running[1])
        rows = None
        if running is not None and self.stacked and not start and not self.plan.extent.before:
            if running[1] == (real_of(self.plan.dtype) if self.parts else self.plan.dtype):
                rows = (slice(None, None, -1 if self.plan.order == "reverse" else 1), *box)
        return Block(kernel, box, running=running, keeps=keeps, rows=rows, **start)

    def _rotation(self, box: Index) -> NDArray[np.intp]:
        """For every element of the box the member at which its ring's block starts."""
        layout, value = self.layout, self.layout.value_box(box)
        positions = [np.arange(part.start, part.stop) for part in value]
        axes = [np.array(0)] * len(value)
        for axis, position in enumerate(positions):
            axes[axis] = position.reshape(-1, *(1 for _ in value[axis + 1 :]))
        if layout.cut is not None:
            blocks = axes[layout.cut]
        else:
            steps = (math.prod(layout.value[axis + 1 :]) for axis in range(len(value)))
            flat = sum((a * step for a, step in zip(axes, steps, strict=True)), np.array(0))
            bounds, starts = self._ring()
            found = np.searchsorted(np.array(bounds[1:]), flat + layout.first, side="right")
            blocks = np.asarray(starts)[found]
        leading = (1,) * (len(layout.batch) + len(value) - blocks.ndim)
        return blocks.reshape(*leading, *blocks.shape, *(1 for _ in layout.parts))


@lru_cache(maxsize=512)
def plan_blocks(
    spec: FoldSpec,
    extent: Extent | None,
    dtype: np.dtype[Any],
    count: int,
    shape: tuple[int, ...],
    batch_ndim: int,
    strides: Strides,
    stacked: bool,
) -> BlockPlan:
    """The BlockPlan of members with these `strides`, which include those of a partial result."""
    plan = plan_fold(spec, extent, dtype, count, shape, batch_ndim)
    return BlockPlan(plan, strides, stacked)


kernels.plan_caches.append(plan_blocks.cache_clear)


def _layout(plan: FoldPlan, strides: Strides, parts: bool) -> ElementLayout:
    """Merge the axes of the members, but not that which a ring cuts."""
    # Without random numbers and a ring's blocks, elements do not depend on their index.
    batch = plan.batch_ndim if plan.arithmetic.stochastic or plan.in_blocks else 0
    shape, rows, cut = plan.shape, list(strides), None
    if plan.slice is not None and plan.spec.cut_axis:
        # Slices of the first axis are blocks of the flattened value.
        cut = plan.batch_ndim + plan.spec.cut_axis
        shape = (*shape[:cut], plan.count, plan.slice, *shape[cut + 1 :])
        rows = [(*row[:cut], row[cut] * plan.slice, *row[cut:]) for row in rows]
    last = len(shape)
    edges = [0, batch, last] if cut is None else [0, batch, cut, cut + 1, last]
    runs = [coalesce(shape[a:b], [row[a:b] for row in rows]) for a, b in pairwise(edges)]
    tail = (2,) if parts else ()
    if cut is None:
        return ElementLayout(runs[0], runs[1] or (1,), tail, None, plan.extent.window)
    before, after = runs[1], runs[3]
    return ElementLayout(runs[0], (*before, shape[cut], *after), tail, len(before), None)
