"""fold: a reduction over a group's members with a defined order of additions and roundings.
The bits of its result are specified; see the numerics contract in the documentation."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fallback import limits, memory, threads
from fallback.arguments import (
    Share,
    check_batch,
    check_cut,
    check_out,
    check_partial,
    check_places,
    check_share,
    check_window,
)
from fallback.arithmetic import Arithmetic, plan
from fallback.draws import Draws
from fallback.formats import real_of
from fallback.general import Grid
from fallback.layout import Index, coalesce, flat_range, split, whole
from fallback.members import Members
from fallback.operators import LOGICAL_OPS
from fallback.orders import ring_bounds
from fallback.philox import Lanes
from fallback.rings import ring_runs
from fallback.rounding import check_counter, check_rounding
from fallback.routes import Task, by_member, by_rows
from fallback.schedules import Order, Program, Schedule, Walks, check_order, compiled
from fallback.subnormals import require_subnormals
from fallback.workspace import own_workspace


def fold(
    members: NDArray[Any] | Sequence[NDArray[Any]],
    *,
    op: str = "sum",
    order: Order = "linear",
    accumulate: DTypeLike | Grid | None = None,
    out_dtype: DTypeLike | None = None,
    divisor: int | None = None,
    batch_ndim: int = 0,
    cut_axis: int | None = None,
    rounding: str = "nearest",
    seed: int = 0,
    call: int = 0,
    places: ArrayLike = 0,
    window: tuple[int, int] | None = None,
    partial: NDArray[Any] | None = None,
    before: int = 0,
    final: bool = True,
    nodes: tuple[int, int, int] | None = None,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Reduce a group's members to one value, element by element, to the contract's bits.

    **Arguments**

    - `members`: an array whose axis 0 is the group's members in order, or a sequence of arrays of
      one shape and dtype. Any strides; nothing is written to them. A member's shape is
      `(*batch, *value)`, where the `batch_ndim` leading axes are independent batch entries.
    - `op`: "sum", "prod", "max", "min", "logical_and" or "logical_or". "max" and "min" let NaN win
      and put -0 below +0.
    - `order`: "linear", "reverse", "tree", "ring", or a `fallback.schedules.Schedule`, which takes
      all members at once and no `cut_axis`, `partial`, `nodes` or `final=False`.
    - `accumulate`: the dtype that sums and products are rounded to after every operation. None is
      the members' own, but float32 for bfloat16 and float16 for the 8-bit formats. A complex
      member's two parts are accumulated in it, or in its parts. Integers wrap in an integer
      `accumulate`, and in their own dtype if it is a floating-point one. A `fallback.general.Grid`
      stands for any format.
    - `out_dtype`: the result's dtype, of the members' kind; None is theirs.
    - `divisor`: divides the fold in the computing type, before the one rounding to `out_dtype`.
    - `cut_axis`: for "ring" only: the value axis (0 is the first after the batch) that is cut into
      equal slices, one a member. None cuts the flattened value.
    - `rounding`, `seed`, `call`, `places`: "nearest" or "stochastic", and the counters of its
      random numbers; `places` is an integer, or integers that broadcast to the batch's shape.
      Complex values are always rounded to nearest.
    - `window`: `(first, total)` says that the members hold, flattened, elements `first` and on of
      a value of `total` elements (in every batch entry). The ring's blocks and the random numbers
      are then those of the whole value, so that a value too large for the memory can be folded
      part by part. There is no `cut_axis` beside it.
    - `partial`, `before`: what the `before` members visited earlier have been folded to, an array
      of a member's shape and of `partial_dtype(members' dtype, accumulate, op)`; the first member
      visited here is combined with it. For "linear" and "reverse" only (which goes from the last
      member given to the first); a block of a ring is a linear fold that starts at its member.
    - `final`: False if more members follow. The result is then the partial result itself, in that
      same dtype; `divisor` and `out_dtype` are left to the fold that ends with True. A tree takes
      False too: the results of subtrees of one power of two of members each (the last may have
      fewer) are members of the tree that ends it, with the same `accumulate` and with the
      `out_dtype` and `divisor` of the whole.
    - `nodes`: for "tree" only: `(level, first, total)` says that the members are nodes `first` and
      on of that level (0: the members themselves; of 2**level of them each) of a tree over `total`
      members. The random numbers are then those of the whole tree, which without it have to be
      none where a tree is folded in parts.
    - `out`: the array to write the result into, C-contiguous and of its shape and dtype, which
      shares no memory with the members or `partial`.

    **Returns** a new C-contiguous array of shape `(*batch, *value)`, or `out`.

    **Raises** ValueError for values outside these, TypeError for dtypes that do not fit, and
    RuntimeError where the thread flushes subnormal numbers to zero.

    >>> import numpy as np
    >>> x = np.array([[1.0], [2.0**-11], [2.0**-11]], np.float16)
    >>> fold(x).tolist(), fold(x, order="reverse").tolist()
    ([1.0], [1.0009765625])
    >>> fold(x, accumulate=np.float32).tolist()
    [1.0009765625]
    >>> first = fold(x[:2], accumulate=np.float32, final=False)
    >>> fold(x[2:], accumulate=np.float32, partial=first, before=2).tolist()
    [1.0009765625]
    """
    require_subnormals()
    check_order(order)
    stochastic = check_rounding(rounding)
    group = Members.of(members)
    out_type = group.dtype if out_dtype is None else np.dtype(out_dtype)
    accumulator = accumulate
    if accumulator is not None and not isinstance(accumulator, Grid):
        accumulator = np.dtype(accumulator)
    from_zero = False
    if isinstance(order, Schedule):
        accumulator = accumulator or order.accumulator(op, group.dtype)
        from_zero = order.adds_zero(op, group.dtype, group.count)
    arithmetic = plan(
        op, group.dtype, accumulator, out_type, divisor, stochastic, bool(final), from_zero
    )
    counters = check_counter("seed", seed), check_counter("call", call)
    shape = group.shape
    check_batch(batch_ndim, shape)
    part_of = check_window(window, math.prod(shape[batch_ndim:]), cut_axis)
    share = check_share(
        order, partial, before, final, nodes, members=group.count, draws=arithmetic.draws
    )
    followed = compiled(
        order,
        members=group.count,
        elements=part_of[1] if part_of else math.prod(shape[batch_ndim:]),
        itemsize=group.dtype.itemsize,
    )
    earlier = None if partial is None else _earlier(partial, shape, arithmetic.partial)
    parts = group.dtype.kind == "c" and op not in LOGICAL_OPS
    cut = None
    if cut_axis is not None and isinstance(order, Schedule):
        raise ValueError(f"cut_axis={cut_axis}: expected None for an order that is a Schedule")
    if order == "ring" and cut_axis is not None:
        divided = _cut(group, batch_ndim, cut_axis)
        if cut_axis:  # slices of the first axis are blocks of the flattened value
            group, cut = divided, batch_ndim + cut_axis
    if out is None:
        out = memory.empty(shape, arithmetic.result)
    else:
        check_out(out, shape, arithmetic.result)
    if not out.size:
        return out
    if parts:
        group, earlier = group.as_reals(), earlier and earlier.as_reals()
    # Without random numbers, rings and walks no element has anything to do with its index.
    cuts = followed == "ring" or isinstance(followed, Walks)
    alike = not arithmetic.stochastic and not cuts
    layout = _layout(group, earlier, 0 if alike else batch_ndim, cut, parts, part_of)
    lanes = places_of = None
    if arithmetic.stochastic or not _is_place(places):
        places_of = check_places(places, shape[:batch_ndim])
    if arithmetic.stochastic:
        lanes = Lanes(*counters)
    _Fold(group, followed, arithmetic, layout, lanes, places_of, share, earlier).run(out)
    return out


@dataclass(frozen=True)
class Layout:
    """The axes of a member once merged: batch entries, the value, and (complex only) two parts."""

    batch: tuple[int, ...]
    value: tuple[int, ...]
    parts: tuple[int, ...]
    cut: int | None  # the value axis whose positions are a ring's blocks
    window: tuple[int, int] | None = None  # the first element held, and how many there are in all

    @property
    def first(self) -> int:
        """The index, in the whole value, of the first element that is held."""
        return self.window[0] if self.window else 0

    @property
    def total(self) -> int:
        """How many elements the whole value has."""
        return self.window[1] if self.window else math.prod(self.value)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch + self.value + self.parts

    def around(self, box: Index) -> Index:
        """A box of the value, for all batch entries and both parts."""
        return (*whole(self.batch), *box, *whole(self.parts))

    def value_box(self, box: Index) -> Index:
        """The part of a box of everything that lies along the value's axes."""
        return box[len(self.batch) : len(self.batch) + len(self.value)]


def _earlier(partial: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Members:
    """What has been folded before, seen as the one member that it is to those that follow."""
    given = np.asarray(partial)
    check_partial(given, shape, dtype)
    return Members(given[np.newaxis])


def _layout(
    group: Members,
    earlier: Members | None,
    batch: int,
    cut: int | None,
    parts: bool,
    window: tuple[int, int] | None,
) -> Layout:
    """Merge the axes that `group` and `earlier` have; axis `cut` is to stay as it is."""
    last = len(group.shape) - parts
    contiguous = group.contiguous and (earlier is None or earlier.contiguous)
    if not batch and cut is None and contiguous:
        return Layout((), (math.prod(group.shape[:last]),), (2,) if parts else (), None, window)
    edges = [0, batch, last] if cut is None else [0, batch, cut, cut + 1, last]
    strides = group.strides + (earlier.strides if earlier else [])
    runs = [coalesce(group.shape[a:b], [row[a:b] for row in strides]) for a, b in pairwise(edges)]
    tail = (2,) if parts else ()
    if cut is None:
        return Layout(runs[0], runs[1] or (1,), tail, None, window)
    before, after = runs[1], runs[3]
    return Layout(runs[0], (*before, group.shape[cut], *after), tail, len(before))


def _cut(group: Members, batch_ndim: int, cut_axis: int) -> Members:
    """Split the axis that a ring cuts into (blocks, elements of a block)."""
    each = check_cut(cut_axis, group.shape[batch_ndim:], group.count)
    axis = batch_ndim + cut_axis
    pieces = group.count, each
    return group.reshape((*group.shape[:axis], *pieces, *group.shape[axis + 1 :]))


def _is_place(given: Any) -> bool:
    return type(given) is int and 0 <= given < 2**64


@dataclass
class _Fold:
    """One fold, cut into tasks that do not depend on each other."""

    group: Members
    order: str | Walks | Program
    arithmetic: Arithmetic
    layout: Layout
    lanes: Lanes | None
    places: NDArray[np.uint64] | None
    share: Share
    earlier: Members | None  # a member of its own dtype: the partial result that comes in

    def run(self, out: NDArray[Any]) -> None:
        """Do all tasks, writing into `out`, whose shape is the layout's."""
        members = self.group.reshape(self.layout.shape)
        earlier = self.earlier and self.earlier.reshape(self.layout.shape)
        flat = out.reshape(-1)
        target = flat.view(real_of(out.dtype)) if self.layout.parts else flat
        target = target.reshape(self.layout.shape)
        fold_one, places = (by_rows, self._rows()) if self._narrow else (by_member, self._blocks())
        capacity = limits.BLOCK

        def fold_box(place: tuple[Index, dict[str, Any]]) -> None:
            require_subnormals()
            box, how = place
            workspace, draws = own_workspace(capacity), self._draws(box)
            with np.errstate(all="ignore"):
                fold_one(
                    Task(
                        members,
                        self.order,
                        self.arithmetic,
                        box,
                        target[box],
                        workspace,
                        draws,
                        self.share,
                        earlier,
                        **how,
                    )
                )

        threads.share(fold_box, places, target.size * members.count)

    @property
    def _narrow(self) -> bool:
        """Whether members, or a ring's blocks of them, are many and small."""
        count, width = self.group.count, math.prod(self.layout.shape)
        if isinstance(self.order, Program):
            return False
        if self.order == "ring" or isinstance(self.order, Walks):
            blocks = len(self.order.starts) if isinstance(self.order, Walks) else count
            width = min(width, width * self.layout.total // (self._elements * blocks))
        # One call adds all rows where none of them is the partial result, which lies elsewhere.
        runs = self.order != "tree" and self.arithmetic.running(width) is not None
        runs = runs and self.earlier is None
        wider = limits.CONVERTED if self.arithmetic.converts else limits.RUNNING if runs else 1
        return count >= limits.ROW_MEMBERS and width < wider * limits.ROW_WIDTH

    @property
    def _elements(self) -> int:
        """How many elements of the value the members hold."""
        return math.prod(self.layout.value)

    def _blocks(self) -> Iterator[tuple[Index, dict[str, Any]]]:
        """Boxes for the way member by member, with the member at which each one's ring starts."""
        least = limits.SHARED_WIDTH
        if self.earlier is not None and self.group.count >= limits.ROW_MEMBERS:
            least *= 8  # that many calls: threads wait for the interpreter's lock in small boxes
        for start, region in self._regions():
            for box in split(region, self._limit(limits.BLOCK, least)):
                yield box, {"start": start}

    def _limit(self, most: int, least: int) -> int:
        """How large boxes may be, for every thread to have one unless that makes them too small."""
        each = -(-math.prod(self.layout.shape) // threads.count())
        return min(most, max(each, least))

    def _regions(self) -> Iterator[tuple[int, Index]]:
        value, count = self.layout.value, self.group.count
        if self.order != "ring" and not isinstance(self.order, Walks):
            yield 0, whole(self.layout.shape)
        elif self.layout.cut is not None:
            axis = self.layout.cut
            for start in range(count):
                box = (*whole(value[:axis]), slice(start, start + 1), *whole(value[axis + 1 :]))
                yield start, self.layout.around(box)
        else:
            bounds, starts = self._walks()
            first, last = self.layout.first, self.layout.first + self._elements
            for block in range(bisect_right(bounds, first) - 1, len(starts)):
                if bounds[block] >= last:
                    return
                low, high = max(bounds[block], first), min(bounds[block + 1], last)
                for box in flat_range(value, low - first, high - first):
                    yield starts[block], self.layout.around(box)

    def _walks(self) -> tuple[Sequence[int], Sequence[int]]:
        """The bounds of the flattened value's blocks, and the member that each one's walk starts
        at."""
        if isinstance(self.order, Walks):
            return self.order.edges, self.order.starts
        return ring_bounds(self.layout.total, self.group.count), range(self.group.count)

    def _rows(self) -> Iterator[tuple[Index, dict[str, Any]]]:
        """Boxes for the way by rows: part of a buffer, so that a chunk has several rows."""
        limit = max(2, limits.BLOCK // 2)
        layout = self.layout
        if self.order != "ring" and not isinstance(self.order, Walks):
            width = limits.SHARED_WIDTH
            if self.arithmetic.converts:
                limit, width = max(2, limit // 4), width // 4
            for box in split(whole(layout.shape), self._limit(limit, width)):
                yield box, {}
        elif self.order == "ring" and len(layout.shape) == 1 and layout.cut is None:
            last = layout.first + self._elements
            for ring, low, high in ring_runs(
                layout.total, self.group.count, layout.first, last, limit
            ):
                yield (slice(low - layout.first, high - layout.first),), {"ring": ring}
        else:
            limit = limit if self.group.stacked else max(2, limits.BLOCK // self.group.count)
            for box in split(whole(layout.shape), limit):
                yield box, {"rotation": self._rotation(box)}

    def _draws(self, box: Index) -> Draws | None:
        if self.lanes is None or self.places is None:
            return None
        places = self.places.reshape(self.layout.batch)
        return Draws(self.lanes, box, self.layout.value, places, self.layout.first)

    def _rotation(self, box: Index) -> NDArray[np.intp]:
        """For every element of the box the member at which its ring's block starts."""
        value = self.layout.value_box(box)
        positions = [np.arange(part.start, part.stop) for part in value]
        axes = [np.array(0)] * len(value)
        for axis, position in enumerate(positions):
            axes[axis] = position.reshape(-1, *(1 for _ in value[axis + 1 :]))
        if self.layout.cut is not None:
            blocks = axes[self.layout.cut]
        else:
            steps = (math.prod(self.layout.value[axis + 1 :]) for axis in range(len(value)))
            flat = sum((a * step for a, step in zip(axes, steps, strict=True)), np.array(0))
            bounds, starts = self._walks()
            found = np.searchsorted(np.array(bounds[1:]), flat + self.layout.first, side="right")
            blocks = np.asarray(starts)[found]
        leading = (1,) * (len(self.layout.batch) + len(value) - blocks.ndim)
        return blocks.reshape(*leading, *blocks.shape, *(1 for _ in self.layout.parts))
