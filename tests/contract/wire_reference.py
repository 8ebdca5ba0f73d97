"""Wires and levels by definition: docs/numerics.md, "On the wire", one number at a time, exactly.

It reads the public fields of `gpusim.Reduction`, `Wire`, `Format` and of schedules as data, and
shares no code with the kernels. Numbers are Fractions, and their rounding is written down here
once more, since wires have formats that `reference_fold` has not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import gpusim
from gpusim.fallback import schedules
from tests.contract.compensated_reference import compensated
from tests.oracles.reference_fold import (
    FLOATS,
    NAN,
    Float,
    Number,
    add,
    decode,
    divide,
    encode,
    floor_log2,
    part_codes,
    philox,
    two,
)

HALF = Fraction(1, 2)
INFINITE, ZERO, ONE = "inf", Fraction(0), Fraction(1)


@dataclass(frozen=True)
class Values:
    """The numbers of a format: those of both signs, and what stands for too large ones.

    From 2**e on they are 2**(e - fraction_bits) apart, and below `min_exponent` as there.
    `smallest` is the first above zero.
    """

    fraction_bits: int
    min_exponent: int
    smallest: Fraction
    largest: Fraction
    has_infinity: bool
    has_negative_zero: bool
    bits: int

    @property
    def overflow(self) -> Any:
        return INFINITE if self.has_infinity else "nan"


def values_of_float(fmt: Float) -> Values:
    ieee, signed_zero = fmt.style == "ieee", fmt.style != "fnuz"
    widths = fmt.fraction_bits, fmt.min_exponent
    return Values(*widths, fmt.magnitude(1), fmt.largest, ieee, signed_zero, fmt.bits)


def integers(bits: int, unit: Fraction = Fraction(1)) -> Values:
    """The multiples of `unit` of `bits` bits, without the lowest one; zero has no sign."""
    most = (2 ** (bits - 1) - 1) * unit
    top = floor_log2(most)
    return Values(top - floor_log2(unit), top, unit, most, False, False, bits)


def small(exponent_bits: int, fraction_bits: int) -> Values:
    """A format of the OCP specification without infinities and NaNs."""
    bias = 2 ** (exponent_bits - 1) - 1
    ulp = two(1 - bias - fraction_bits)
    largest = two(2**exponent_bits - 1 - bias) * (2 - two(-fraction_bits))
    widths = fraction_bits, 1 - bias
    return Values(*widths, ulp, largest, False, True, 1 + exponent_bits + fraction_bits)


DTYPES = {name: values_of_float(fmt) for name, fmt in FLOATS.items()}
NAMED = {
    **DTYPES,
    "float6_e2m3fn": small(2, 3),
    "float6_e3m2fn": small(3, 2),
    "float4_e2m1fn": small(2, 1),
    "int8": integers(8),
    "int4": integers(4),
    "mxint8": integers(8, two(-6)),
}
FLOAT32, FLOAT64 = DTYPES["float32"], DTYPES["float64"]


def values_of(given: Any) -> Values:
    """The numbers of a dtype, a name or a `gpusim.Format`."""
    if not isinstance(given, gpusim.Format):
        return NAMED[given if given in NAMED else np.dtype(given).name]
    assert given.mantissa_bits or given.has_subnormals
    assert given.exponent_bits and given.is_signed and given.bias is not None
    assert given.high_nans is not None and given.has_negative_zero is not None
    code = 2 ** (given.exponent_bits + given.mantissa_bits) - 1
    code -= given.high_nans + given.has_infinities

    def magnitude(code: int) -> Fraction:
        exponent, fraction = divmod(code, 2**given.mantissa_bits)
        if exponent == 0 and (given.has_subnormals or fraction == 0):
            whole, exponent = fraction, 1
        else:
            whole = fraction + 2**given.mantissa_bits
        assert given.bias is not None
        return whole * two(exponent - given.bias - given.mantissa_bits)

    return Values(
        given.mantissa_bits,
        (1 if given.has_subnormals else 0) - given.bias,
        magnitude(1),
        magnitude(code),
        given.has_infinities,
        given.has_negative_zero,
        given.bits,
    )


def held_by_float32(values: Values) -> bool:
    return (
        values.fraction_bits <= 23
        and values.min_exponent - values.fraction_bits >= -149
        and values.largest <= FLOAT32.largest
    )


def round_to(
    x: Number, values: Values, lane: int | None = None, *, saturate: bool = False
) -> Number:
    """Round to the nearest, ties to even, or with a lane to one of the neighbours."""
    if x.magnitude == "nan":
        return x
    if x.magnitude == INFINITE:
        return Number(x.negative, values.largest if saturate else values.overflow)
    if x.magnitude != 0:
        if x.magnitude < values.smallest:
            low, ulp, share, odd = ZERO, values.smallest, x.magnitude / values.smallest, False
        else:
            exponent = max(floor_log2(x.magnitude), values.min_exponent)
            ulp = two(exponent - values.fraction_bits)
            steps, share = divmod(x.magnitude / ulp, 1)
            code = steps if values.fraction_bits else exponent - values.min_exponent + 1
            low, odd = steps * ulp, code % 2 == 1
        if lane is None:
            up = share > HALF or (share == HALF and odd)
        else:
            up = lane < math.floor(share * 2**32)
        rounded = low + ulp if up else low
        if rounded > values.largest:
            return Number(x.negative, values.largest if saturate else values.overflow)
        x = Number(x.negative, rounded)
    return Number(x.negative and (values.has_negative_zero or x.magnitude != 0), x.magnitude)


def lane(seed: int, stream: int, step: int, call: int, place: int, index: int) -> int:
    word = _block(seed, stream, index // 8, step, call, place)[index % 8 // 2]
    return word >> 32 if index % 2 else word & 0xFFFF_FFFF


@functools.lru_cache(1 << 14)
def _block(seed: int, stream: int, block: int, step: int, call: int, place: int) -> list[int]:
    return philox((seed, stream), (1 + block, step, call, place))


# What a message becomes.


def send(
    message: Sequence[Number],
    rows: Sequence[int],
    wire: gpusim.Wire,
    computing: Values,
    lanes: Callable[[int], int | None],
) -> list[Number]:
    """What arrives of a message, whose elements lie in these rows of the value.

    `lanes` gives the random number of each.
    """
    values = values_of(wire.format)
    if wire.scale is None:
        return [round_to(x, values, lanes(i)) for i, x in enumerate(message)]
    if isinstance(wire.scale, float):
        given = Fraction(wire.scale)
        return [scaled(x, given, values, computing, lanes(i)) for i, x in enumerate(message)]
    if wire.scale == "nvfp4":
        return send_in_two_levels(message, int(wire.block), values, computing, lanes)
    arrived: list[Number] = []
    while len(arrived) < len(message):
        first = last = len(arrived)
        while last < len(message) and in_block(wire.block, first, last, rows):
            last += 1
        block = [(x, lanes(i)) for i, x in enumerate(message[first:last], first)]
        arrived += send_block(block, wire.scale, values, computing)
    return arrived


def scaled(
    x: Number,
    scale: Fraction,
    values: Values,
    computing: Values,
    u: int | None,
    unit: Fraction = ONE,
) -> Number:
    """An element that is divided by the scale in its unit, rounded, and multiplied again."""
    if not x.finite:
        whole = round_to(x, values, saturate=True)
    else:
        by = round_to(Number(False, scale * unit), computing).magnitude
        quotient = round_to(Number(x.negative, x.magnitude / by if by else ZERO), computing)
        whole = round_to(quotient, values, u, saturate=True)
    if whole.magnitude == "nan":
        return NAN
    back = round_to(Number(whole.negative, whole.magnitude * scale), computing)
    if not back.finite:
        return back
    return round_to(Number(back.negative, back.magnitude * unit), computing)


def send_in_two_levels(
    message: Sequence[Number],
    size: int,
    values: Values,
    computing: Values,
    lanes: Callable[[int], int | None],
) -> list[Number]:
    """NVFP4: blocks of `size` elements have scales in float8_e4m3fn, in the message's unit."""

    def in_c(magnitude: Fraction) -> Fraction:
        rounded = round_to(Number(False, magnitude), computing).magnitude
        assert isinstance(rounded, Fraction)
        return rounded

    if not message or not all(x.finite for x in message):
        return [NAN] * len(message)
    eight = DTYPES["float8_e4m3fn"]
    amax = max(x.magnitude for x in message)
    unit = round_to(Number(False, in_c(amax / (6 * 448))), FLOAT32).magnitude
    if unit == INFINITE:
        return [NAN] * len(message)
    unit, arrived = max(unit, two(-149)), []
    for first in range(0, len(message), size):
        block = message[first : first + size]
        largest = in_c(in_c(max(x.magnitude for x in block) / 6) / unit)
        scale = round_to(Number(False, largest), eight, saturate=True).magnitude
        arrived += [
            scaled(x, scale, values, computing, lanes(i), unit) for i, x in enumerate(block, first)
        ]
    return arrived


def in_block(block: int | str | None, first: int, i: int, rows: Sequence[int]) -> bool:
    """Whether element i has the scale of element `first`, which begins a block."""
    if block is None:
        return True
    return rows[i] == rows[first] if block == "row" else i < first + int(block)


def send_block(
    block: list[tuple[Number, int | None]], rule: str, values: Values, computing: Values
) -> list[Number]:
    def in_c(magnitude: Fraction) -> Number:
        return round_to(Number(False, magnitude), computing)

    if not all(x.finite for x, _ in block):
        return [NAN] * len(block)
    amax = max(x.magnitude for x, _ in block)
    if amax == 0:
        return [Number(x.negative and values.has_negative_zero, ZERO) for x, _ in block]
    scale = scale_of(amax, rule, values, in_c)
    if scale is None:
        return [NAN] * len(block)
    arrived = []
    for x, u in block:
        scaled = Number(x.negative, in_c(x.magnitude / scale).magnitude)
        rounded = round_to(scaled, values, u, saturate=True)
        back = in_c(rounded.magnitude * scale)
        arrived.append(Number(rounded.negative, back.magnitude))
    return arrived


def scale_of(
    amax: Fraction, rule: str, values: Values, in_c: Callable[[Fraction], Number]
) -> Fraction | None:
    """The scale of a block; None where it is infinite."""
    if rule == "amax":
        scale = round_to(in_c(amax / values.largest), FLOAT32)
        return max(scale.magnitude, two(-149)) if scale.finite else None
    top = floor_log2(values.largest)
    if rule == "floor":
        exponent = floor_log2(amax) - top
    elif rule == "ceil":
        exponent = floor_log2(amax) + (two(floor_log2(amax)) != amax) - top
    else:
        assert rule == "even"
        ulp = two(floor_log2(amax) - values.fraction_bits)
        exponent = floor_log2(round(amax / ulp) * ulp) - top  # round() takes ties to even
    return two(min(max(exponent, -127), 127))


# Which values are sent.


class Addition(NamedTuple):
    """Of two nodes; members are nodes 0..R-1, and the k-th addition makes node R - 1 + k."""

    left: int
    right: int
    sent: int  # 0: the left one goes to the right one, 1: the other way


def chain(start: int, step: int, members: int) -> list[Addition]:
    visited = [(start + step * turn) % members for turn in range(members)]
    total, additions = visited[0], []
    for member in visited[1:]:
        additions.append(Addition(total, member, 0))
        total = members - 1 + len(additions)
    return additions


def tree(members: int, pairs: int = 0) -> list[Addition]:
    """The first `pairs` pairs, and then a tree over what is there."""
    nodes, additions = list(range(members)), []

    def level(nodes: list[int]) -> list[int]:
        above = []
        for left, right in zip(nodes[::2], nodes[1::2], strict=False):
            additions.append(Addition(left, right, 1))
            above.append(members - 1 + len(additions))
        return above + nodes[len(above) * 2 :]

    nodes = level(nodes[: 2 * pairs]) + nodes[2 * pairs :]
    while len(nodes) > 1:
        nodes = level(nodes)
    return additions


def binary(members: int) -> list[Addition]:
    node, additions = list(range(members)), []
    for r in reversed(range(members)):
        level = 2 ** floor_log2(Fraction(r + 1))
        for child in (r + level, r + 2 * level):
            if child < members:
                additions.append(Addition(node[child], node[r], 0))
                node[r] = members - 1 + len(additions)
    return additions


Cut = list[tuple[int, int]]  # of each element: its message, and the ring block that this is


def balanced(elements: int, members: int) -> Cut:
    lengths = [elements // members + (b < elements % members) for b in range(members)]
    return [(b, b) for b, length in enumerate(lengths) for _ in range(length)]


def segments(cut: schedules.Segments, elements: int, members: int, itemsize: int) -> Cut:
    """Segments of equal length, as many as all members have in common, `least` for each."""
    most = max(itemsize, cut.most // itemsize * itemsize)
    number = cut.least * members
    while number * most < elements * itemsize or number % members:
        number += 1
    length = math.ceil(Fraction(elements, number))
    return [(b, b) for b in (i // (length * (number // members)) for i in range(elements))]


def loops(cut: schedules.Loops, elements: int, members: int, itemsize: int) -> Cut:
    """In each channel loops over `members` chunks; the last loop shares what is left."""
    unit = max(1, cut.align // itemsize)
    whole = max(unit, cut.chunk // itemsize // unit * unit)
    part = math.ceil(Fraction(math.ceil(Fraction(elements, cut.channels)), unit)) * unit
    blocks: list[tuple[int, int]] = []
    message = 0
    while len(blocks) < elements:
        left = min(part - len(blocks) % part, elements - len(blocks))  # of this channel
        chunk = min(whole, math.ceil(Fraction(math.ceil(Fraction(left, members)), unit)) * unit)
        for b in range(members):
            length = min(chunk, left)
            blocks += [(message + b, b)] * length
            left -= length
        message += members
    return blocks


class Plan(NamedTuple):
    """What is sent of a value: element i is in messages[i], which has these additions."""

    messages: list[int]
    additions: dict[int, list[Addition]]
    from_zero: bool = False


def fixed_sum(members: list[list[Number]], integers: str) -> list[Number]:
    """The exact sum of multiples of a unit that 256 elements of all members have in common."""
    bits, room = np.iinfo(integers).bits, 0
    while 2**room < len(members):
        room += 1
    columns = list(zip(*members, strict=True))
    found: list[Number] = []
    while len(found) < len(columns):
        block = columns[len(found) : len(found) + 256]
        finite = [x.magnitude for column in block for x in column if x.finite]
        largest = max(finite, default=ZERO)
        unit = two(floor_log2(largest) + 1 + room - bits + 2) if largest else Fraction(1)
        for column in block:
            if all(x.finite for x in column):
                total = sum(round(x.value / unit) for x in column) * unit  # ties to even
                found.append(Number(total < 0, abs(total)))
            else:
                found.append(functools.reduce(add, column))
    return found


def case_of(order: schedules.Schedule, members: int, elements: int, itemsize: int) -> Any:
    power = 2 ** floor_log2(Fraction(members))
    for case in order.cases:
        (fewest, most), (least, below) = case.members, case.bytes
        limit = {None: math.inf, "members": members, "power": power}[case.fewer_than]
        if (
            fewest <= members <= (most or math.inf)
            and least <= elements * itemsize
            and (below is None or elements * itemsize < below)
            and elements < limit
        ):
            return case.fold
    raise AssertionError("no case")


def plan(
    order: Any, members: int, elements: int, itemsize: int, slices: list[int] | None = None
) -> Plan:
    """What is sent in this order; `slices` gives a ring's block of each element, if it cuts so."""
    if order == "ring" and slices is not None:
        return Plan(slices, {b: chain(b, 1, members) for b in slices})
    named = {
        "linear": schedules.Walk(),
        "exact": schedules.Walk(),
        "fixed": schedules.Walk(),
        "kahan": schedules.Walk(),
        "neumaier": schedules.Walk(),
        "reverse": schedules.Walk(start=-1, step=-1),
        "tree": schedules.Tree(),
        "ring": schedules.Walk(cut=schedules.Balanced()),
    }
    if isinstance(order, schedules.Schedule):
        fold, from_zero = case_of(order, members, elements, itemsize), order.from_zero
    else:
        fold, from_zero = named[order], False
    if isinstance(fold, schedules.Binary):
        return Plan([0] * elements, {0: binary(members)}, from_zero)
    if isinstance(fold, schedules.Tree):
        pairs = members - 2 ** floor_log2(Fraction(members)) if fold.pairs_first else 0
        return Plan([0] * elements, {0: tree(members, pairs)}, from_zero)
    cut: Cut = [(0, 0)] * elements
    if members == 1:  # which sends nothing
        pass
    elif isinstance(fold.cut, schedules.Balanced):
        cut = balanced(elements, members)
    elif isinstance(fold.cut, schedules.Segments):
        cut = segments(fold.cut, elements, members, itemsize)
    elif isinstance(fold.cut, schedules.Loops):
        cut = loops(fold.cut, elements, members, itemsize)
    chains = {m: chain(fold.start + b, fold.step, members) for m, b in set(cut)}
    return Plan([m for m, _ in cut], chains, from_zero)


# Folds, in levels.


class Level(NamedTuple):
    """A Reduction's own level, numbered from 0."""

    number: int
    how: gpusim.Reduction

    @property
    def above(self) -> Level:
        assert self.how.across is not None
        return Level(self.number + 1, self.how.across)


class Kind(NamedTuple):
    """What the members of a level are: their numbers, the name of their dtype, or a Format."""

    values: Values
    given: Any

    @classmethod
    def of(cls, given: Any) -> Kind:
        return cls(values_of(given), given)

    @property
    def itemsize(self) -> int:
        if isinstance(self.given, gpusim.Format):
            return 4 if held_by_float32(self.values) else 8
        return int(self.values.bits // 8)


@dataclass(frozen=True)
class Place:
    """Where a fold's random numbers lie."""

    call: int
    place: int

    def inner(self, number: int, which: int) -> Place:
        return Place(self.call, (self.place * number + which) % 2**64)


@dataclass(frozen=True)
class Output:
    """What the last level does, and which elements are `slices` of psum_scatter."""

    kind: Kind
    divisor: int | None
    gathered: bool
    slices: list[int] | None
    members_divided: bool


class Fold:
    """One fold of a level: a group's members, each a list of numbers."""

    def __init__(self, level: Level, kind: Kind, place: Place, out: Kind) -> None:
        self.level, self.kind, self.place, self.how = level, kind, place, level.how
        self.accumulator = self._accumulator(out)
        self.divisor: int | None = None  # of members
        wide = {FLOAT64} & {kind.values, self.accumulator.values}
        wide_format = not held_by_float32(self.accumulator.values)
        self.computing = FLOAT64 if wide or wide_format else FLOAT32
        self.wire = level.how.wire
        self.computing_wire = self.computing
        self.computing_quotient = self.computing
        if self.how.order == "fixed":
            self.computing = FLOAT64
        if self.wire is not None and not held_by_float32(values_of(self.wire.format)):
            self.computing_wire = FLOAT64

    def _accumulator(self, out: Kind) -> Kind:
        order, given = self.how.schedule, self.how.accumulate
        if given is not None and order != "fixed":
            return Kind.of(given if isinstance(given, gpusim.Format) else given.name)
        if order == "exact" and self.how.groups_of is None:
            return out
        if isinstance(order, schedules.Schedule) and order.hops == "own":
            return self.kind
        if order == "fixed" and isinstance(self.kind.given, gpusim.Format):
            return Kind.of("float32" if held_by_float32(self.kind.values) else "float64")
        if self.kind.given == "bfloat16":
            return Kind.of("float32")
        narrow = isinstance(self.kind.given, str) and self.kind.given.startswith("float8")
        return Kind.of("float16") if narrow else self.kind

    def in_c(self, x: Number) -> Number:
        return round_to(x, self.computing)

    def rounded(self, x: Number, kind: Kind, step: int, index: int) -> Number:
        u = None
        if self.how.rounding == "stochastic" and kind.values.bits < 32:
            stream = 2 * self.level.number
            u = lane(self.how.seed, stream, step, self.place.call, self.place.place, index)
        return round_to(x, kind.values, u)

    def sent(
        self, xs: Sequence[Number], messages: Sequence[int], rows: Sequence[int], step: Any
    ) -> list[Number]:
        """What arrives of a value that is sent message by message; `step` by message."""
        wire = self.wire
        assert isinstance(wire, gpusim.Wire)
        arrived: list[Number] = list(xs)
        for message in sorted(set(messages)):
            if step(message) is None:
                continue
            chosen = [i for i, m in enumerate(messages) if m == message]

            def drawn(n: int, chosen: list[int] = chosen, at: int = step(message)) -> int | None:
                if wire.rounding == "nearest" or values_of(wire.format).bits >= 32:
                    return None
                return lane(
                    self.how.seed,
                    2 * self.level.number + 1,
                    at,
                    self.place.call,
                    self.place.place,
                    chosen[n],
                )

            found = send(
                [xs[i] for i in chosen],
                [rows[i] for i in chosen],
                wire,
                self.computing_wire,
                drawn,
            )
            for i, x in zip(chosen, found, strict=True):
                arrived[i] = x
        return arrived

    def divided(self, xs: Iterable[Number], divisor: int | None) -> list[Number]:
        """Members as they are added; quotients are rounded to the accumulator."""
        if divisor is None:
            return list(xs)
        return self.received(round_to(divide(x, divisor), self.computing_quotient) for x in xs)

    def received(self, xs: Iterable[Number]) -> list[Number]:
        return [round_to(x, self.accumulator.values) for x in xs]

    def quotients(self, xs: list[Number]) -> list[Number]:
        """A member, divided where a mean divides members; that of one member alone is itself."""
        if self.divisor is None or self.divisor == 1:
            return xs
        return self.received(self.in_c(divide(x, self.divisor)) for x in xs)

    def add_up(
        self,
        members: list[list[Number]],
        rows: list[int],
        planned: Plan,
        divisor: int | None = None,
    ) -> list[Number]:
        """The sum, rounded to the accumulator unless it is that of one member.

        `divisor` divides each member.
        """
        count = len(members)
        if count == 1:
            return self.quotients(members[0])
        messages = planned.messages
        if self.wire is not None and self.wire.at in ("ends", "members"):
            members = [
                self.received(self.sent(x, messages, rows, lambda _, m=m: count + 1 + m))
                for m, x in enumerate(members)
            ]
        members = [self.divided(x, divisor) for x in members]
        members = [self.quotients(x) for x in members]
        if self.how.schedule == "exact":
            total = [functools.reduce(add, column) for column in zip(*members, strict=True)]
            return [self.rounded(x, self.accumulator, 1, i) for i, x in enumerate(total)]
        if self.how.schedule == "fixed":
            return fixed_sum(members, str(self.how.accumulate or "int32"))
        if self.how.order in ("kahan", "neumaier"):
            order, values = str(self.how.order), self.accumulator.values
            columns = zip(*members, strict=True)
            return [
                compensated(order, x, lambda x: round_to(self.in_c(x), values)) for x in columns
            ]
        hops = self.wire is not None and self.wire.at == "hops"
        result: list[Number] = list(members[0])
        for message in sorted(set(messages)):
            chosen = [i for i, m in enumerate(messages) if m == message]
            nodes = [[x[i] for i in chosen] for x in members]
            for step, addition in enumerate(planned.additions[message], 1):
                pair = [nodes[addition.left], nodes[addition.right]]
                if hops:
                    whole: list[Number] = [NAN] * len(messages)
                    for i, x in zip(chosen, pair[addition.sent], strict=True):
                        whole[i] = x
                    only = self.sent(
                        whole,
                        messages,
                        rows,
                        lambda m, k=step, own=message: k if m == own else None,
                    )
                    pair[addition.sent] = self.received(only[i] for i in chosen)
                added = [self.in_c(add(x, y)) for x, y in zip(*pair, strict=True)]
                if planned.from_zero:
                    added = [add(x, Number(False, ZERO)) for x in added]
                nodes.append(
                    [
                        self.rounded(x, self.accumulator, step, i)
                        for i, x in zip(chosen, added, strict=True)
                    ]
                )
            for i, x in zip(chosen, nodes[-1], strict=True):
                result[i] = x
        return result


def fold_value(
    members: list[list[Number]],
    rows: list[int],
    level: Level,
    kind: Kind,
    place: Place,
    output: Output,
) -> list[Number]:
    """The result of a level and those above it, as it arrives at every member."""
    count, size = len(members), len(rows)
    fold = Fold(level, kind, place, output.kind)
    if level.how.divide == "members":
        fold.divisor, output = output.divisor, replace(output, divisor=None)
    order, group = level.how.schedule, level.how.groups_of or count
    first = min(group, count)  # the members of the first group
    planned = plan(order, first, size, kind.itemsize, output.slices)
    if level.how.groups_of is None:
        by_member = output.divisor if level.how.divide == "members" else None
        total = fold.add_up(members, rows, planned, by_member)
        if output.divisor is not None and not output.members_divided:
            total = [fold.in_c(divide(x, output.divisor)) for x in total]
        result = [fold.rounded(x, output.kind, count, i) for i, x in enumerate(total)]
    else:
        result = fold_across(members, rows, fold, planned, output)
    wire = level.how.wire
    if wire is not None and wire.at != "members" and output.gathered and first > 1:
        arrived = fold.sent(result, planned.messages, rows, lambda _: first)
        result = [round_to(x, output.kind.values) for x in arrived]
    return result


def fold_across(
    members: list[list[Number]], rows: list[int], fold: Fold, planned: Plan, output: Output
) -> list[Number]:
    """Sum the groups of a level, and each block of their results across."""
    level, place, size = fold.level, fold.place, len(rows)
    of = level.how.groups_of
    assert of is not None
    groups = [members[first : first + of] for first in range(0, len(members), of)]
    by_member = output.divisor if level.how.divide == "members" else None
    sums = []
    for g, group in enumerate(groups):
        own = Fold(level, fold.kind, place.inner(len(groups), g), output.kind)
        own.divisor = fold.divisor
        total = own.add_up(
            group, rows, plan(level.how.schedule, len(group), size, fold.kind.itemsize), by_member
        )
        if len(group) == 1:
            total = own.divided(total, by_member)
        if len(group) == 1 or level.how.order == "fixed":
            total = [own.rounded(x, own.accumulator, 1, i) for i, x in enumerate(total)]
        sums.append(total)
    result: list[Number] = [NAN] * size
    blocks = sorted(set(planned.messages))  # those that are not empty
    for number, message in enumerate(blocks):
        chosen = [i for i, m in enumerate(planned.messages) if m == message]
        arrived = fold_value(
            [[total[i] for i in chosen] for total in sums],
            [rows[i] for i in chosen],
            level.above,
            fold.accumulator,
            place.inner(len(blocks), number),
            output,
        )
        for i, x in zip(chosen, arrived, strict=True):
            result[i] = x
    return result


def reference(
    members: Sequence[np.ndarray],
    reduction: gpusim.Reduction,
    *,
    mean: bool = False,
    batch_ndim: int = 0,
    gathered: bool = True,
    cut_axis: int | None = None,
    out_dtype: Any = None,
    call: int = 0,
    places: Any = 0,
) -> list[tuple[int | None, ...]]:
    """Return the codes of the result (None: NaN), element by element in C order.

    `gathered` and `cut_axis` are for psum_scatter: False, and the value's axis that it cuts.
    """
    arrays = [np.asarray(member) for member in members]
    shape, name = arrays[0].shape, arrays[0].dtype.name
    batch, value = shape[:batch_ndim], shape[batch_ndim:]
    size, row = math.prod(value), value[-1] if value else 1
    rows = [i // max(1, row) for i in range(size)]
    slices = None
    if cut_axis is not None and reduction.order == "ring" and reduction.groups_of is None:
        length = value[cut_axis] // len(arrays)
        slices = [index[cut_axis] // length for index in product(*map(range, value))]
    out = Kind.of(name if out_dtype is None else np.dtype(out_dtype).name)
    output = Output(
        out, len(arrays) if mean else None, gathered, slices, reduction.divide == "members"
    )
    spread = np.broadcast_to(np.asarray(places), batch)
    codes = [part_codes(array).reshape(*batch, size) for array in arrays]
    results = []
    for entry in product(*map(range, batch)):
        numbers = [[decode(int(code), FLOATS[name]) for code in each[entry]] for each in codes]
        place = Place(call, int(spread[entry]))
        found = fold_value(numbers, rows, Level(0, reduction), Kind.of(name), place, output)
        results += [(encode(x, FLOATS[out.given]),) for x in found]
    return results


def one_message(
    x: np.ndarray, wire: gpusim.Wire, seed: int = 0, place: int = 0
) -> list[tuple[int | None, ...]]:
    """Return the codes of `round_to(x, wire)`, whose random numbers are those of `round_to`."""
    name, values = x.dtype.name, values_of(wire.format)
    wide = name == "float64" or not held_by_float32(values)
    draws = wire.rounding == "stochastic" and values.bits < 32
    row = max(1, x.shape[-1] if x.shape else 1)
    arrived = send(
        [decode(int(code), FLOATS[name]) for code in part_codes(x).reshape(-1)],
        [i // row for i in range(x.size)],
        wire,
        FLOAT64 if wide else FLOAT32,
        lambda i: lane(seed, 0, 1, 0, place, i) if draws else None,
    )
    return [(encode(round_to(each, DTYPES[name]), FLOATS[name]),) for each in arrived]
