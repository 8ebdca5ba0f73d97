"""Folds with a wire and in levels on a device: fallback.sends' walk, by the kernels of wire.cu.
A launch is an addition of which one operand was sent; blocks of many elements take two."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpusim.fallback.arguments import check_batch_offset, check_cut, check_out
from gpusim.fallback.formats import FLOAT32, FLOAT64, check_float
from gpusim.fallback.orders import EXACT, FIXED
from gpusim.fallback.rounding import check_counter, check_places
from gpusim.fallback.sends import Level, Places, Rows, Run, by_linear, fold_of_integers
from gpusim.fallback.spec import FoldSpec
from gpusim.fallback.wires import SCALES, WireInfo

from ..libraries import as_bits
from .device import Array, Device, Kernel, Launch
from .folding import C_NAMES, ROUNDINGS, Numbers, finish_float, finish_numbers, fold_members
from .layout import Members
from .structs import HOP, struct
from .targets import NAMES, target

#: Elements that a thread may have: those of a short block, or of a long one's part.
UNIT = 32
DRAWN_UNIT = 8  # of one of Philox's blocks


def fold_sent(
    device: Device,
    spec: FoldSpec,
    members: Any,
    *,
    batch_ndim: int = 0,
    call: int = 0,
    batch_offset: Any = 0,
    out: Any = None,
) -> Array:
    """`fallback.sends.fold_sent` for arrays of `device`: the same arguments, errors and bits.

    **Raises**: also ValueError for order="fixed", and for means that divide="members".
    """
    group = Members.of(members, device)
    dtype, shape, count = group.layout.dtype, group.layout.shape, group.layout.number
    plain = fold_of_integers(spec, dtype, shape, batch_ndim)
    if plain is not None:
        return fold_members(device, plain, members, batch_ndim=batch_ndim, out=out)
    _check_orders(spec)
    if spec.divide == "members" and spec.divisor is not None:
        raise ValueError("divide='members': expected NumPy arrays; GPUs have no kernels for it")
    check_counter("call", call)
    if not (spec.wire or spec.groups_of):
        numbers = {"call": call, "batch_offset": batch_offset}
        return fold_members(device, spec.plain, members, batch_ndim=batch_ndim, out=out, **numbers)
    batch, value = shape[:batch_ndim], shape[batch_ndim:]
    places = np.broadcast_to(check_batch_offset(batch_offset, batch), batch).reshape(-1)
    result = np.dtype(spec.out_dtype or dtype)
    if out is not None:
        check_out(out, shape, result)
    entries, size = math.prod(batch), math.prod(value)
    row, slices = value[-1] if value else 1, (1, size)
    if spec.cut_axis is not None and not spec.groups_of:
        length = check_cut(spec.cut_axis, value, count)
        slices = count, length * math.prod(value[spec.cut_axis + 1 :])
        row //= count if spec.cut_axis == len(value) - 1 else 1
    if not entries or not size:
        return device.empty(shape, result) if out is None else out
    arrays = group.contiguous(device).arrays
    if group.pointers is None:
        stacked = arrays[0].reshape(count, entries, size)
        rows = [stacked[member] for member in range(count)]
    else:
        rows = [array.reshape(entries, size) for array in arrays]
    spec = replace(spec, cut_axis=None, out_dtype=result, divide="result")
    level = DeviceLevel(device, spec, call, row, slices)
    total = level.fold(rows, places).reshape(shape)
    if out is None:
        return total
    level.copy(total, out)
    return out


def round_to_wire(
    device: Device,
    x: Any,
    wire: WireInfo,
    *,
    rounding: str = "nearest",
    seed: int = 0,
    step: int = 1,
    call: int = 0,
    place: Any = 0,
    batch_ndim: int = 0,
) -> Array:
    """`fallback.wires.round_to_wire` for arrays of `device`: the same arguments and bits."""
    check_float("x", x.dtype)
    batch, value = x.shape[:batch_ndim], x.shape[batch_ndim:]
    common, listed = check_places(place, batch)
    places = np.full(math.prod(batch), common, np.uint64) if listed is None else listed.reshape(-1)
    check_counter("step", step)
    check_counter("call", call)
    if not math.prod(x.shape):
        return device.empty(x.shape, x.dtype)
    row = device.contiguous(x).reshape(len(places), math.prod(value))
    spec = FoldSpec(wire=wire, seed=seed, out_dtype=x.dtype)
    last = value[-1] if value else 1
    level = DeviceLevel(device, spec, call, last, (1, row.shape[1]))
    run = DeviceRun(level, spec, [row], places, stream=0)
    return run.hop(Operand(result=row), step).reshape(x.shape)


def _check_orders(spec: FoldSpec | None) -> None:
    """ValueError for an order of any level that has no kernels."""
    while spec is not None:
        if spec.order == FIXED:
            raise ValueError("order='fixed': expected NumPy arrays; GPUs have no kernels for it")
        spec = spec.across


class DeviceLevel(Level):
    """One level of a fold, on a device.

    `slices`: the number of slices of a ring's cut, and the elements of one in a row of them: (1,
    size) without.
    """

    def __init__(
        self,
        device: Device,
        spec: FoldSpec,
        call: int,
        row: int,
        slices: tuple[int, int],
        number: int = 0,
        first: int = 0,
    ) -> None:
        super().__init__(spec, call, row, None, number, first)
        self.device, self.slices = device, slices

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self.device.empty(shape, dtype)

    def copy(self, source: Array, target: Array) -> None:
        as_bits(target)[...] = as_bits(source)

    def above(self, spec: FoldSpec, first: int) -> DeviceLevel:
        number = self.number + 1
        return DeviceLevel(self.device, spec, self.call, self.row, (1, 1), number, first)

    def run(self, spec: FoldSpec, rows: Rows, places: Places) -> DeviceRun:
        return DeviceRun(self, spec, rows, places)

    def fold_plain(self, spec: FoldSpec, rows: Rows, places: Places) -> Array:
        return fold_members(
            self.device, spec, rows, batch_ndim=1, call=self.call, batch_offset=places
        )

    def fold_lone(self, spec: FoldSpec, row: Array, places: Places) -> Array:
        run = self.run(spec, [row, row], places)
        return run.hop(run.member(0), sum_step=1, last=True)


class Operand(NamedTuple):
    """A member; of a chain, the one visited at a step; or a partial result, or a result."""

    member: int = 0
    chained: bool = False
    partial: Array | None = None
    result: Array | None = None


class DeviceRun(Run):
    """A fold without levels, each step by a launch."""

    level: DeviceLevel

    def __init__(
        self,
        level: DeviceLevel,
        spec: FoldSpec,
        rows: Rows,
        places: Places,
        stream: int | None = None,
    ) -> None:
        super().__init__(level, spec, rows, places)
        self._stream = 2 * level.number + 1 if stream is None else stream
        self.device = level.device
        self.computing: np.dtype[Any] = self.arithmetic.computing
        self.numbers = Numbers(self.plan)
        self._template = self._arguments()

    def fold_compiled(self) -> None:
        """None: there are kernels for each step."""

    def fold_all(self) -> Array:
        plain, (count, _) = by_linear(self.spec), self.level.slices
        if not (self.wire.at_hops or self.wire.at_members) and count == 1:
            return self.level.fold_plain(plain, self.rows, self.places)
        if self.plan.order == EXACT:
            members = self.device.empty((self.members, *self.shape), self.computing)
            for number in range(self.members):
                self.hop(self.member(number), self._member_step(number), out=members[number])
            plain = replace(plain, order=EXACT, accumulate=self.arithmetic.accumulator)
            return self.level.fold_plain(plain, members, self.places)
        if self.plan.in_blocks or self.plan.order in ("linear", "reverse"):
            return self._add_chain()
        return self._add_graph()

    def send_results(self, out: Array) -> Array:
        return self.hop(Operand(result=out), self.members)

    def member(self, number: int) -> Operand:
        return Operand(number)

    def _at_step(self, step: int) -> Operand:
        return Operand(self.direction * step % self.members, chained=True)

    def _member_step(self, number: int = 0) -> int | None:
        return self.members + 1 + number if self.wire.at_members else None

    def _add_chain(self) -> Array:
        total = self._at_step(0)
        if self.wire.at_members:
            total = Operand(partial=self.hop(total, self._member_step(), by_member=True))
        for step in range(1, self.members):
            how: dict[str, Any] = {"sum_step": step, "last": step == self.members - 1}
            if not how["last"]:
                how["out"] = total.partial
            member = self._at_step(step)
            if self.wire.at_members:
                found = self.hop(member, self._member_step(), total, by_member=True, **how)
            else:
                found = self.hop(total, step if self.wire.at_hops else None, member, **how)
            total = Operand(partial=found)
        return total.partial

    def _add_graph(self) -> Array:
        stack: list[Operand] = []
        for instruction in self.postfix:
            if instruction >= 0:
                operand = self.member(instruction)
                if self.wire.at_members:
                    step = self._member_step(instruction)
                    operand = Operand(partial=self.hop(operand, step))
                stack.append(operand)
                continue
            second, first = stack.pop(), stack.pop()
            sent, kept = (first, second) if self.first_is_sent else (second, first)
            step = -instruction
            last = len(stack) == 0 and instruction == self.postfix[-1]
            arrays = [each.partial for each in (sent, kept) if each.partial is not None]
            found = self.hop(
                sent,
                step if self.wire.at_hops else None,
                kept,
                sum_step=step,
                last=last,
                out=arrays[0] if arrays and not last else None,
            )
            stack.append(Operand(partial=found))
        return stack.pop().partial

    # A launch

    def hop(
        self,
        sent: Operand,
        wire_step: int | None = None,
        kept: Operand | None = None,
        *,
        by_member: bool = False,
        sum_step: int | None = None,
        last: bool = False,
        out: Array | None = None,
    ) -> Array:
        """Store `sent`, as it arrives, plus `kept`; a result in its own dtype.

        **Arguments**:

        - `wire_step`: the step of the wire's random numbers; None: `sent` is not sent.
        - `by_member`: whether a member's number is added to it.
        - `sum_step`: the step of the sum's rounding to the accumulator; None: it is not rounded.
        - `last`: whether the sum is finished: divided, and rounded to the result's dtype.
        - `out`: the array to write to, or None for a new one.
        """
        arguments, numbers = self._template.copy(), self.numbers
        keeps = [self._set(arguments, "sent", sent)]
        if kept is not None:
            keeps.append(self._set(arguments, "kept", kept))
            arguments["adds"] = True
        if sum_step is not None and numbers.step != "EXACT":
            arguments["rounds"], arguments["sum_drawn"] = True, numbers.step_drawn
            arguments["sum_step"] = sum_step
        finish = arguments["finish"]
        result = sent.result is not None
        held = numbers.out if last or result else self.computing
        if last:
            finish_numbers(finish, numbers)
        else:
            finish_float(finish, self.computing, held, rounds=result, drawn=False)
        drawn = bool(arguments["sum_drawn"] or finish["drawn"])
        if wire_step is not None:
            self._set_wire(arguments, wire_step, by_member)
            arguments["arrives"] = not result and numbers.step != "EXACT"
            drawn = drawn or self.wire.draws
        blocks = int(self._blocks[-1])
        source = self.rows[0].dtype if sent.result is None else sent.result.dtype
        scaled = wire_step is not None and self.wire.scale is not None
        width = DRAWN_UNIT if drawn else 1
        arguments["width"] = 0 if scaled and self._longest <= UNIT else width
        elements = self.shape[1]
        arguments["units"] = -(-elements // width) if arguments["width"] else blocks
        if scaled and self._longest > UNIT:
            keeps.append(self._largest(arguments, blocks, source))
            arguments["amax"] = self.device.pointer(keeps[-1])
        if out is None:
            out = self.device.empty(self.shape, held)
        arguments["out"], arguments["out_pitch"] = self.device.pointer(out), elements
        arguments["out_placed"] = last or result
        self._launch("hop", arguments, source)
        return out

    def _launch(self, name: str, arguments: NDArray[Any], source: np.dtype[Any]) -> None:
        kernel = template(name, source, self.computing)
        threads = int(arguments["entries"] * arguments["units"])
        self.device.run(Launch(kernel, arguments, threads))

    def _largest(self, arguments: NDArray[Any], blocks: int, source: np.dtype[Any]) -> Array:
        """The largest magnitudes of all blocks, a part of a block to a thread."""
        arguments = arguments.copy()
        pieces, found = self._longest, None
        while found is None or pieces > 1:
            if found is not None:
                arguments["reduces"], arguments["amax"] = pieces, self.device.pointer(found)
            pieces = -(-pieces // UNIT)
            made = self.device.empty((self.shape[0], blocks, pieces), self.computing)
            arguments["pieces"], arguments["units"] = pieces, blocks * pieces
            arguments["out"] = self.device.pointer(made)
            self._launch("amax", arguments, source)
            found = made
        return found

    def _set(self, arguments: NDArray[Any], name: str, operand: Operand) -> Array:
        into = arguments[name]
        into["member"], into["chained"] = operand.member, operand.chained
        table, into["pitch"] = self._members, self._pitch
        if operand.partial is not None:
            into["base"] = self.device.pointer(operand.partial)
        if operand.result is not None:
            table, into["pitch"] = self._table([operand.result]), self.shape[1]
        into["table"] = self.device.pointer(table)
        return table if operand.partial is None else operand.partial

    def _table(self, arrays: Rows) -> Array:
        pointers = np.array([self.device.pointer(each) for each in arrays], np.uint64)
        return self.device.constant(pointers.tobytes())

    def _set_wire(self, arguments: NDArray[Any], step: int, by_member: bool) -> None:
        wire, info = self.wire, self.wire.info
        arguments["step"], arguments["by_member"] = step, by_member
        if info is None:
            if wire.format == FLOAT32 and self.computing == FLOAT64:
                arguments["rounding"] = ROUNDINGS.index("float32")
            return
        arguments["rounding"] = ROUNDINGS.index("target")
        arguments["rule"] = SCALES.index(wire.scale)
        arguments["wide"], arguments["drawn"] = info.carrier == FLOAT64, wire.draws
        arguments["max_exponent"], arguments["target"] = info.max_exponent, target(wire.format)

    def _arguments(self) -> NDArray[Any]:
        """What all launches have in common."""
        device, (entries, elements), number = self.device, self.shape, self.level.number
        first = self.members - 1 if self.plan.order == "reverse" else 0
        starts = self.chain_starts or [first] * (len(self.edges) - 1)
        spans = zip(pairwise(self.edges), starts, strict=True)
        messages = [(a, b, start) for (a, b), start in spans if a < b]
        block, anchor = self.wire.block, 0
        length = elements if block is None else block
        if block == "row":
            length = max(1, self.level.row)
            anchor = -self.level.first % length
        length = int(length)
        bases = [a if block != "row" else a - (a - anchor) % length for a, _, _ in messages]
        counts = [-(-(b - base) // length) for (_, b, _), base in zip(messages, bases, strict=True)]
        self._blocks = [0, *accumulate(counts)]
        self._longest = min(length, max(b - a for a, b, _ in messages))
        tables = {
            "edges": [0, *(b for _, b, _ in messages)],
            "blocks": self._blocks,
            "bases": bases,
            "starts": [start for _, _, start in messages],
        }
        self._kept = {
            name: device.constant(np.array(table, np.int64).tobytes())
            for name, table in tables.items()
        }
        self._members = self._table(self.rows)
        self._offsets = device.constant(self.places.astype(np.uint64).tobytes())
        self._pitch = self.rows[0].strides[0] // self.rows[0].dtype.itemsize
        slices, slice = self.level.slices
        arguments = struct(
            HOP,
            stream=self._stream,
            messages=len(messages),
            members=self.members,
            length=length,
            entries=entries,
            elements=elements,
            slices=slices,
            slice=slice,
            **{name: device.pointer(array) for name, array in self._kept.items()},
        )
        if self.numbers.step != "EXACT":
            arguments["accumulator"] = target(self.numbers.accumulator)
        finish = arguments["finish"]
        finish["stream"], finish["seed"] = 2 * number, self.spec.seed
        finish["step"], finish["call"] = self.members, self.level.call
        finish["batch_offsets"] = device.pointer(self._offsets)
        return arguments


def template(name: str, source: np.dtype[Any], computing: np.dtype[Any]) -> Kernel:
    """The kernel for members of a dtype."""
    return Kernel("wire.cu", f"{name}<{NAMES[source]}, {C_NAMES[computing]}>")
