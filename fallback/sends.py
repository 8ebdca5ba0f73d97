"""Folds in which what is sent is rounded, and folds in levels: the contract's "On the wire".

Each element's members are visited as in other folds. A fold is cut into spans of whole blocks, in
memory of a few blocks each, which threads share.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import kernels, limits, memory, threads
from .arguments import check_batch, check_batch_offset, check_cut, check_out
from .arithmetic import Arithmetic
from .compensated import compensated_sum
from .decode import decode, encode
from .fold import fold_members
from .formats import FLOAT64, FormatInfo, kind_of
from .members import Members
from .orders import COMPENSATED, EXACT, FIXED, ring_bounds
from .philox import Lanes
from .plan import FoldPlan, plan_fold
from .schedules import ChainSchedule, ReductionGraph, Schedule, Walk, neighbours
from .spec import FIXED_TYPES, FoldSpec, check_room, is_exact
from .subnormals import require_subnormals
from .unscaled import fold_compiled, sends_first
from .wires import NVFP4, WireInfo, arrived, round_message
from .workspace import own_workspace

Rows = Sequence[NDArray[Any]]  # a member each: (batch entries, elements)
Places = NDArray[np.uint64]


def fold_sent(
    spec: FoldSpec,
    group: Members,
    *,
    batch_ndim: int = 0,
    call: int = 0,
    batch_offset: Any = 0,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """`run_fold` with a `wire` or levels.

    **Raises**: as `run_fold` and `check_room`; TypeError for complex members.
    """
    require_subnormals()
    shape = group.shape
    plain = fold_of_integers(spec, group.dtype, shape, batch_ndim)
    if plain is not None:
        return fold_members(plain, group.arrays, batch_ndim=batch_ndim, out=out)
    check_room(spec, group.count)
    divisor = spec.divisor if spec.divide == "members" and group.count > 1 else None
    if not (spec.wire or spec.groups_of or spec.order == FIXED or divisor):
        numbers: dict[str, Any] = {"call": call, "batch_offset": batch_offset}
        return fold_members(spec.plain, group.arrays, batch_ndim=batch_ndim, out=out, **numbers)
    batch, value = shape[:batch_ndim], shape[batch_ndim:]
    places = check_batch_offset(batch_offset, batch).reshape(-1)
    result = np.dtype(spec.out_dtype or group.dtype)
    if out is None:
        out = memory.empty(shape, result)
    else:
        check_out(out, shape, result)
    whole = not (spec.groups_of or divisor)
    if whole and fold_compiled(spec, group, batch_ndim, call, places, out):
        return out
    cut = None if spec.groups_of else spec.cut_axis
    order = _slices_first(value, cut, group.count) if cut is not None else None
    entries, size = math.prod(batch), math.prod(value)
    rows = [group.block(m, ()).reshape(entries, size) for m in range(group.count)]
    if order is not None:
        rows = [np.take(row, order, axis=1) for row in rows]
    row = value[-1] if value else 1
    if cut is not None and cut == len(value) - 1:
        row //= group.count
    spec = replace(spec, cut_axis=None, out_dtype=result, divide="result")
    if divisor is not None:
        spec = replace(spec, divisor=None)
    level = Level(spec, call, row, order, divisor=divisor)
    total = level.fold(rows, places)
    target = out.reshape(entries, size)
    if order is None:
        target[...] = total
    else:
        target[:, order] = total
    return out


def fold_of_integers(
    spec: FoldSpec, dtype: np.dtype[Any], shape: tuple[int, ...], batch_ndim: int
) -> FoldSpec | None:
    """The fold of integer members, which wrap in any order and on any wire; None for floats.

    **Raises**: TypeError for complex members, ValueError for a batch that they do not have.
    """
    kind = kind_of(dtype)
    if kind == "complex":
        raise TypeError(f"{dtype} members: expected real ones beside wire and groups_of")
    check_batch(batch_ndim, shape)
    return None if kind == "float" else replace(by_linear(spec), order="linear", cut_axis=None)


def _slices_first(value: tuple[int, ...], axis: int, members: int) -> NDArray[np.intp]:
    """The elements of a value, slice by slice of an axis that is cut for its members."""
    length = check_cut(axis, value, members)
    places = np.arange(math.prod(value), dtype=np.intp)
    slices = places.reshape(*value[:axis], members, length, *value[axis + 1 :])
    return np.moveaxis(slices, axis, 0).reshape(-1)


#: The wire of values that are sent as they are.
UNROUNDED = WireInfo(FLOAT64, at="result")

UNIT_BLOCK = 256
"""Elements that have a unit in common in the order "fixed"."""


class Level:
    """One level of a fold, and those across it.

    **Arguments**: `row` is the length of a value's rows; `order` has the elements' numbers, if they
    are not 0, 1, ...; `first` is the number of the first element in the value of level 0; `divisor`
    divides members.
    """

    def __init__(
        self,
        spec: FoldSpec,
        call: int,
        row: int,
        order: NDArray[np.intp] | None = None,
        number: int = 0,
        first: int = 0,
        divisor: int | None = None,
    ) -> None:
        self.spec, self.call, self.row, self.order = spec, call, row, order
        self.number, self.first, self.divisor = number, first, divisor

    def fold(self, rows: Rows, places: Places) -> NDArray[Any]:
        """The result (entries, elements), as members receive it."""
        if self.spec.groups_of is None:
            return self._fold_one(self.spec, rows, places)
        return self._fold_groups(self.spec.groups_of, rows, places)

    def _fold_groups(self, size: int, rows: Rows, places: Places) -> NDArray[Any]:
        spec, across = self.spec, self.spec.across
        assert across is not None
        groups = [rows[first : first + size] for first in range(0, len(rows), size)]
        dtype, (entries, elements) = rows[0].dtype, rows[0].shape
        inner = replace(spec.plain, wire=spec.wire, gathered=False, divisor=None)
        held = accumulator_of(spec, dtype, len(groups[0]), rows[0].shape)
        if inner.order != FIXED:
            inner = replace(inner, accumulate=held)
        inner = replace(inner, out_dtype=held.carrier if isinstance(held, FormatInfo) else held)
        count = np.uint64(len(groups))
        sums = [
            self._fold_group(inner, group, places * count + np.uint64(number))
            for number, group in enumerate(groups)
        ]
        changes: dict[str, Any] = {
            name: getattr(spec, name) for name in ("out_dtype", "divisor", "gathered")
        }
        if isinstance(held, FormatInfo) and across.accumulate is None:
            exact = is_exact(across.order)
            if (exact and across.groups_of) or not (exact or across.order == FIXED):
                changes["accumulate"] = held  # the members' type, which no dtype stands for
        above = replace(across, **changes)
        plan = plan_of(inner, dtype, len(groups[0]), (entries, elements))
        blocks = [(a, b) for a, b in pairwise(edges_of(inner, plan, dtype)) if a < b]
        out = self.empty((entries, elements), spec.out_dtype)
        for number, (a, b) in enumerate(blocks):
            level = self.above(above, self.first + a)
            at = places * np.uint64(len(blocks)) + np.uint64(number)
            self.copy(level.fold([total[:, a:b] for total in sums], at), out[:, a:b])
        if spec.wire and spec.wire.at_result and spec.gathered and len(groups[0]) > 1:
            run = self.run(replace(inner, out_dtype=spec.out_dtype), groups[0], places)
            return run.send_results(out)
        return out

    def _fold_group(self, spec: FoldSpec, rows: Rows, places: Places) -> Any:
        """The sum of a group, rounded to the accumulator also where it is a single member."""
        if len(rows) > 1:
            return self._fold_one(spec, rows, places)
        lone = replace(by_linear(spec), order="linear", stream=2 * self.number)
        return self.fold_lone(lone, rows[0], places)

    def _fold_one(self, spec: FoldSpec, rows: Rows, places: Places) -> Any:
        """A fold without levels."""
        spec = replace(spec, stream=2 * self.number)
        if len(rows) == 1 and spec.order == FIXED and spec.divisor is not None:
            rows = [rows[0].astype(np.float64)]  # in which its means are divided
        if len(rows) == 1 or not (spec.wire or spec.order == FIXED or self.divisor):
            return self.fold_plain(by_linear(spec), rows, places)
        return self.run(spec, rows, places).result()

    # What depends on where the arrays are

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.empty(shape, dtype)

    def fold_lone(self, spec: FoldSpec, row: Any, places: Places) -> Any:
        """The sum of a member and -0."""
        return self._fold_one(spec, [row, np.full_like(row, -0.0)], places)

    def copy(self, source: Any, target: Any) -> None:
        target[...] = source

    def above(self, spec: FoldSpec, first: int) -> Level:
        """The level across, of the elements from `first` on."""
        return Level(spec, self.call, self.row, None, self.number + 1, first)

    def run(self, spec: FoldSpec, rows: Rows, places: Places) -> Run:
        return Run(self, spec, rows, places)

    def fold_plain(self, spec: FoldSpec, rows: Rows, places: Places) -> Any:
        return fold_members(spec, rows, batch_ndim=1, call=self.call, batch_offset=places)


class _Box:
    """Some entries and elements: whole blocks of what has one scale."""

    def __init__(self, entries: slice, first: int, end: int) -> None:
        self.entries, self.first, self.end = entries, first, end
        #: The chains of its elements: the first member of each.
        self.chains: list[tuple[int, _Box]] = []

    @property
    def index(self) -> tuple[slice, slice]:
        return self.entries, slice(self.first, self.end)


class Run:
    """A fold without levels whose messages are rounded."""

    def __init__(self, level: Level, spec: FoldSpec, rows: Rows, places: Places) -> None:
        self.level, self.spec, self.rows, self.places = level, spec, rows, places
        self.wire: WireInfo = spec.wire or UNROUNDED
        self.members, self.shape = len(rows), rows[0].shape
        self.plan = plan_of(spec, rows[0].dtype, self.members, self.shape)
        self.arithmetic: Arithmetic = self.plan.arithmetic
        self.edges = edges_of(spec, self.plan, rows[0].dtype)
        self.added = Lanes(spec.seed, level.call, 2 * level.number)
        self.sent = Lanes(spec.seed, level.call, 2 * level.number + 1)

    def result(self) -> Any:
        """The result (entries, elements), as members receive it."""
        out = self.fold_compiled()
        if out is not None:
            return out
        sends = self.spec.wire is not None and self.wire.at_result and self.spec.gathered
        return self.send_results(self.fold_all()) if sends else self.fold_all()

    def fold_compiled(self) -> Any:
        """`result` by one compiled kernel; None where there is none."""
        level = self.level
        if level.divisor or level.order is not None:  # whose random numbers have another order
            return None
        out = np.empty(self.shape, self.spec.out_dtype)
        group = Members([*self.rows])
        done = fold_compiled(self.spec, group, 1, level.call, self.places, out)
        return out if done else None

    def fold_all(self) -> Any:
        """The result (entries, elements), not yet sent round."""
        out = np.empty(self.shape, self.spec.out_dtype)
        if self.plan.order == EXACT:
            self.fold_exactly(out)
        elif self.spec.order == FIXED:
            self.share(lambda box: self.fold_fixed(box, out))
        else:
            self.share(lambda box: self.fold(box, out))
        return out

    def send_results(self, out: Any) -> Any:
        """The result as it is sent round; may be in the same memory."""
        self.share(lambda box: self.send_result(box, out))
        return out

    # How the work is cut

    def boxes(self) -> list[_Box]:
        entries, elements = self.shape
        if not entries or not elements:
            return []
        if self.level.order is not None and (self.wire.draws or self.arithmetic.stochastic):
            box = _Box(slice(0, entries), 0, elements)  # their numbers are drawn together
            box.chains = self._chains(box)
            return [box]
        cuts = self.starts.tolist() if self.wire.scale != NVFP4 else sorted(set(self.edges))[:-1]
        if self.wire.scale is None or self.wire.is_given:
            cuts = sorted({*range(0, elements, limits.SENT_BLOCK), *self.edges[:-1]})
        long = elements >= limits.SENT_BLOCK // 4 * len(self.edges)  # a box for each block
        ends = set(self.edges) if long else ()
        if self.spec.order == FIXED:
            units = range(0, elements, UNIT_BLOCK)
            cuts = [cut for cut in cuts if not cut % UNIT_BLOCK] if self.wire.scale else [*units]
        rows = max(1, min(entries, limits.SENT_BLOCK // max(1, elements)))
        width = max(1, limits.SENT_BLOCK // rows)
        spans, first = [], 0
        for cut, following in pairwise([*cuts, elements]):
            if cut > first and (following - first > width or cut in ends):
                spans.append((first, cut))
                first = cut
        spans.append((first, elements))
        boxes = [
            _Box(slice(e, min(e + rows, entries)), a, b)
            for e in range(0, entries, rows)
            for a, b in spans
        ]
        for box in boxes:
            box.chains = self._chains(box)
        return boxes

    def share(self, job: Any) -> None:
        def run(box: _Box) -> None:
            require_subnormals()
            with np.errstate(all="ignore"):
                job(box)

        threads.share(run, self.boxes(), math.prod(self.shape) * self.members)

    # A box

    def fold(self, box: _Box, out: NDArray[Any]) -> None:
        order = self.plan.order
        if isinstance(order, ReductionGraph) or order == "tree":
            total = self._graph(box)
        elif order in COMPENSATED:
            total = self._compensated(box)
        else:
            total = self._chain(box)
        workspace = own_workspace(limits.BLOCK)
        held = np.empty(total.shape, out.dtype)
        self.arithmetic.finish(total, held, self.members, self._draws(box), workspace)
        out[box.index] = held

    def fold_exactly(self, out: NDArray[Any]) -> None:
        """Of all members at once."""
        spec = replace(self.spec.plain, order=EXACT, accumulate=self.arithmetic.accumulator)
        members = np.empty((self.members, *self.shape), self.arithmetic.computing)

        def load(box: _Box) -> None:
            for member in range(self.members):
                members[(member, *box.index)] = self._member(member, box)

        self.share(load)
        out[...] = fold_members(
            spec, members, batch_ndim=1, call=self.level.call, batch_offset=self.places
        )

    def fold_fixed(self, box: _Box, out: NDArray[Any]) -> None:
        """Add integers, exactly: multiples of a power of two that leaves room for all members."""
        starts = np.arange(0, box.end - box.first, UNIT_BLOCK)
        largest: Any = 0.0
        for member in range(self.members):
            magnitudes = np.abs(self._member(member, box)).astype(np.float64)
            magnitudes[~np.isfinite(magnitudes)] = 0.0
            largest = np.maximum(largest, np.maximum.reduceat(magnitudes, starts, axis=1))
        bits = FIXED_TYPES[str(self.spec.accumulate or "int32")]
        room = (self.members - 1).bit_length()
        units = np.frexp(largest)[1] + (room - (bits - 2))
        lengths = np.diff(starts, append=box.end - box.first)
        exponents = np.repeat(units, lengths, axis=1)
        total: Any = 0.0
        special: Any = 0.0
        for member in range(self.members):
            values = self._member(member, box).astype(np.float64)
            finite = np.isfinite(values)
            total = total + np.rint(np.ldexp(np.where(finite, values, 0.0), -exponents))
            special = special + np.where(finite, 0.0, values)
        result = np.where(special != 0, special, np.ldexp(total, exponents))
        if self.spec.divisor is not None:
            result /= self.spec.divisor
        held = np.empty(result.shape, out.dtype)
        encode(arrived(result, out.dtype), held, own_workspace(limits.BLOCK))
        out[box.index] = held

    def send_result(self, box: _Box, out: NDArray[Any]) -> None:
        """Round a part of the result, in place, as it is sent round."""
        part = out[box.index]
        values = np.empty(part.shape, self.arithmetic.computing)
        decode(part, values)
        values = self._sent(values, box, self.members)
        held = np.empty(part.shape, out.dtype)
        encode(arrived(values, out.dtype), held, own_workspace(limits.BLOCK))
        out[box.index] = held

    def _compiled_chain(self, box: _Box) -> NDArray[Any] | None:
        """`_chain` by a compiled kernel; None where there is none."""
        compiled, addresses = kernels.compiled(), self._addresses
        if compiled is None or addresses is None or self.level.divisor:
            return None
        if not self.wire.is_compiled:
            return None
        shape = box.entries.stop - box.entries.start, box.end - box.first
        total = np.empty(shape, self.arithmetic.computing)
        for first, part in box.chains:
            numbers = (first + self.direction * np.arange(self.members)) % self.members
            row = self.rows[0][part.index]
            done = compiled.fold_chain(
                total[:, part.first - box.first : part.end - box.first],
                addresses[numbers] + np.uint64(row.ctypes.data - self.rows[0].ctypes.data),
                numbers,
                row,
                self.wire,
                self._starts(part),
                self.arithmetic.accumulator if self.arithmetic.rounds_steps else None,
                draws=self.arithmetic.draws_steps,
                seed=self.spec.seed,
                call=self.level.call,
                streams=(2 * self.level.number, 2 * self.level.number + 1),
                places=self.places[part.entries],
                index=part.first,
            )
            if not done:
                return None
        return total

    def _chain(self, box: _Box) -> NDArray[Any]:
        folded = self._compiled_chain(box)
        if folded is not None:
            return folded
        total = self._visited(0, box)
        if self._in_place:
            total = total.copy()
        for step in range(1, self.members):
            total = self._add(total, self._visited(step, box), box, step)
        return total

    def _compensated(self, box: _Box) -> NDArray[Any]:
        shape, workspace = (
            (box.entries.stop - box.entries.start, box.end - box.first),
            own_workspace(limits.BLOCK),
        )

        def load(member: int) -> tuple[NDArray[Any], None]:
            return self._member(member, box), None

        order, count = str(self.plan.order), self.members
        total = compensated_sum(order, load, count, shape, self.arithmetic, workspace)
        found = total.copy()
        workspace.give(total)
        return found

    def _add(self, sent: NDArray[Any], kept: NDArray[Any], box: _Box, step: int) -> NDArray[Any]:
        """Add `kept` to what arrives of `sent`, whose memory is used, and round the sum."""
        wire, arithmetic = self.wire if self.wire.at_hops else None, self.arithmetic
        compiled = kernels.compiled()
        if compiled is not None and (wire is None or wire.is_compiled):
            drawn = wire is not None and wire.draws
            done = compiled.add(
                sent,
                kept,
                wire,
                None if wire is None else self._starts(box),
                self._lanes(self.sent, box, step) if drawn else None,
                arithmetic.accumulator if arithmetic.rounds_steps else None,
                self._lanes(self.added, box, step) if arithmetic.draws_steps else None,
            )
            if done:
                return sent
        if wire is not None:
            sent = self._arrived(self._sent(sent, box, step))
        sent += kept
        arithmetic.round_step(sent, step, self._draws(box), own_workspace(limits.BLOCK))
        return sent

    def _graph(self, box: _Box) -> NDArray[Any]:
        stack: list[NDArray[Any]] = []
        own: list[bool] = []  # whether an entry is not a member's own memory
        for instruction in self.postfix:
            if instruction >= 0:
                stack.append(self._member(instruction, box))
                own.append(not self._in_place)
                continue
            kept, sent = (1, 0) if self.first_is_sent else (0, 1)
            pair, copied = stack[-2:], not own[-2 + sent]
            del stack[-2:], own[-2:]
            total = pair[sent].copy() if copied else pair[sent]
            stack.append(self._add(total, pair[kept], box, -instruction))
            own.append(True)
        return stack.pop()

    @cached_property
    def starts(self) -> NDArray[np.intp]:
        """The first elements of the blocks that have one scale."""
        return self.wire.starts(sorted(set(self.edges)), self.level.row, self.level.first)

    @cached_property
    def postfix(self) -> tuple[int, ...]:
        order = self.plan.order
        graph = order if isinstance(order, ReductionGraph) else neighbours(self.members)
        return graph.postfix

    @cached_property
    def first_is_sent(self) -> bool:
        return sends_first(self.spec, self.members, self.shape[1], self.rows[0].dtype)

    def _chains(self, box: _Box) -> list[tuple[int, _Box]]:
        """The first member of each chain in a box, and the part of the box that it folds."""
        starts = self.chain_starts
        if starts:
            first = max(0, bisect_right(self.edges, box.first) - 1)
            found = []
            for block in range(first, len(starts)):
                a, b = self.edges[block], self.edges[block + 1]
                if a >= box.end:
                    break
                if a < b:
                    part = _Box(box.entries, max(a, box.first), min(b, box.end))
                    found.append((starts[block], part))
            return found
        return [(self.members - 1 if self.plan.order == "reverse" else 0, box)]

    @cached_property
    def chain_starts(self) -> Sequence[int]:
        """The first member of each message's chain; none if all are alike."""
        order = self.plan.order
        if order == "ring":
            return range(self.members)
        return order.starts if isinstance(order, ChainSchedule) else ()

    @cached_property
    def direction(self) -> int:
        order = self.plan.order
        return order.step if isinstance(order, ChainSchedule) else -1 if order == "reverse" else 1

    @cached_property
    def _addresses(self) -> NDArray[np.uint64] | None:
        """Where the members lie, if they lie alike and their elements are in the value's order."""
        alike = all(row.strides == self.rows[0].strides for row in self.rows)
        if not alike or self.level.order is not None:
            return None
        return np.array([row.ctypes.data for row in self.rows], np.uint64)

    @cached_property
    def _in_place(self) -> bool:
        """Whether members are added as they lie in memory."""
        given = self.rows[0].dtype == self.arithmetic.computing
        return given and not (self.wire.at_members or self.level.divisor)

    def _visited(self, step: int, box: _Box) -> NDArray[Any]:
        """The values that the chains of a box visit at a step: a member's memory if `_in_place`."""
        members = [(first + self.direction * step) % self.members for first, _ in box.chains]
        if len(members) == 1:
            return self._member(members[0], box)
        shape = box.entries.stop - box.entries.start, box.end - box.first
        found = np.empty(shape, self.arithmetic.computing)
        together = self.wire.at_members and not self.wire.draws and not self.level.divisor
        for member, (_, part) in zip(members, box.chains, strict=True):
            target = found[:, part.first - box.first : part.end - box.first]
            if together:
                decode(self.rows[member][part.index], target)
            else:
                target[...] = self._member(member, part)
        return self._arrived(self._sent(found, box, 0)) if together else found

    def _member(self, member: int, box: _Box) -> NDArray[Any]:
        """A member's values in the computing type, as they arrive."""
        part = self.rows[member][box.index]
        if self._in_place:
            return part
        values = np.empty(part.shape, self.arithmetic.computing)
        decode(part, values)
        if self.wire.at_members:
            values = self._arrived(self._sent(values, box, self.members + 1 + member))
        if self.level.divisor:
            values = self._arrived(values / values.dtype.type(self.level.divisor))
        return values

    def _sent(self, values: NDArray[Any], box: _Box, step: int) -> NDArray[Any]:
        lanes = self._lanes(self.sent, box, step) if self.wire.draws else None
        messages = self._messages(box) if self.wire.scale == NVFP4 else None
        return round_message(values, self.wire, self._starts(box), lanes, messages)

    def _messages(self, box: _Box) -> NDArray[np.intp]:
        """The first elements of a box's messages, which are whole."""
        starts = np.array(sorted(set(self.edges))[:-1], np.intp)
        first, end = np.searchsorted(starts, (box.first, box.end))
        return starts[first:end] - box.first

    def _starts(self, box: _Box) -> NDArray[np.intp]:
        """The first elements of a box's blocks that have one scale."""
        first, end = np.searchsorted(self.starts, (box.first, box.end))
        return self.starts[first:end] - box.first

    def _arrived(self, values: NDArray[Any]) -> NDArray[Any]:
        return arrived(values, self.arithmetic.accumulator)

    # Random numbers

    def _draws(self, box: _Box) -> Any:
        return _BoxDraws(self, box) if self.arithmetic.stochastic else None

    def _lanes(self, lanes: Lanes, box: _Box, step: int) -> NDArray[np.uint32]:
        order = self.level.order
        first, count = (box.first, box.end - box.first) if order is None else (0, len(order))
        drawn = [
            lanes.draw(count, start=first, step=step, batch_offset=int(place))
            for place in self.places[box.entries]
        ]
        found = drawn[0].reshape(1, -1) if len(drawn) == 1 else np.stack(drawn)
        return found if order is None else found[:, order[box.first : box.end]]


class _BoxDraws:
    """The lanes of a box's additions, as `fallback.draws.Draws`."""

    def __init__(self, run: Run, box: _Box) -> None:
        self._run, self._box = run, box

    def draw(self, shape: tuple[int, ...], step: int) -> NDArray[np.uint32]:
        return self._run._lanes(self._run.added, self._box, step).reshape(shape)


def by_linear(spec: FoldSpec) -> FoldSpec:
    """The spec without phases."""
    if spec.order != FIXED:
        return spec.plain
    return replace(spec.plain, order="linear", accumulate=None)


def plan_of(spec: FoldSpec, dtype: np.dtype[Any], members: int, shape: tuple[int, ...]) -> FoldPlan:
    return plan_fold(by_linear(spec), None, dtype, members, shape, 1)


def accumulator_of(
    spec: FoldSpec, dtype: np.dtype[Any], members: int, shape: tuple[int, ...]
) -> Any:
    """The accumulator of a level, where its field may be None."""
    plan = plan_of(spec, dtype, members, shape)
    if plan.order == EXACT:
        plan = plan_of(replace(spec.plain, order="linear"), dtype, members, shape)
    return plan.arithmetic.accumulator


def edges_of(spec: FoldSpec, plan: FoldPlan, dtype: np.dtype[Any]) -> list[int]:
    """Where the messages of an order begin and end."""
    if plan.order == "ring":
        return ring_bounds(plan.total, plan.count)
    if isinstance(plan.order, ChainSchedule):
        return list(plan.order.edges)
    if isinstance(spec.order, Schedule) and plan.count > 1 and plan.total:
        fold = spec.order.fold_of(plan.count, plan.total, dtype.itemsize)
        if isinstance(fold, Walk) and fold.cut is not None:  # its chains start at one member
            return sorted(set(fold.cut.blocks(plan.count, plan.total, dtype.itemsize)))
    return [0, plan.total]
