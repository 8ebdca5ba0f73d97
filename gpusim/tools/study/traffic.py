"""The bytes that a reduction sends: how much of a study's error buys how much traffic."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from gpusim.collectives.fold import fold_spec
from gpusim.fallback.formats import FormatInfo
from gpusim.fallback.orders import COMPENSATED, FIXED
from gpusim.fallback.sends import UNIT_BLOCK, accumulator_of, edges_of, plan_of
from gpusim.fallback.spec import FIXED_TYPES, check_room, is_exact
from gpusim.formats import Format, FormatLike
from gpusim.reduction import Reduction, ReductionLike, as_reduction
from gpusim.tools.study.settings import ValueFormat, carrier, value_format
from gpusim.wires import Wire, as_wire

__all__ = ["Traffic", "bytes_sent", "traffic_of"]


def bytes_sent(
    reduction: ReductionLike,
    members: int,
    elements: int,
    dtype: DTypeLike | FormatLike,
    *,
    gathered: bool = True,
) -> float:
    """The bytes that each member sends for a sum of values of `elements` elements, on average.

    In every order each addition has one operand sent to it, so that R members send R - 1 times
    what a value takes; members whose own values are sent (a wire at "ends" or "members", "exact",
    "fixed", "kahan", "neumaier") send as much. The result is sent to R - 1 members. In levels the
    same holds for each group, and across the groups. This is 2 (R - 1) / R values for each member,
    which is optimal (Patarasuk and Yuan, 2009). Scales of blocks are counted: 4 bytes each, 1 for
    powers of two; in NVFP4 1 for each block, and 4 for each message.

    In the order "fixed" the integers of `accumulate` are sent, both to be added and as the sum, if
    there is no level above. The unit of a block is that of all members, so that it has to be sent
    too: a byte, its exponent, for each block of 256 elements, with the members' integers and with
    the sum's. A wire is sent instead of them where there is one.

    **Arguments**:

    - `dtype`: of the values, and of the result.
    - `gathered`: False for a psum_scatter, whose result is not sent.

    **Returns**: bytes; codes of fewer than 8 bits are packed.

    **Raises**: ValueError for a number of members or elements that is none, for blocks of rows,
    where a twin's order is not known for so many members, and where integers have no room for them.

    >>> from gpusim import Reduction, Wire
    >>> bytes_sent(Reduction(order="ring"), 4, 1000, "float32")
    6000.0
    >>> bytes_sent(Reduction(order="ring", wire=Wire("int8", "amax", 100)), 4, 1000, "float32")
    1572.0
    >>> across = Reduction(order="ring", wire="bfloat16")
    >>> bytes_sent(Reduction(order="ring", groups_of=2, across=across), 4, 1000, "float32")
    5000.0
    >>> bytes_sent(Reduction(order="fixed", accumulate="int8"), 4, 1000, "float32")
    1506.0
    """
    if operator.index(members) < 1 or operator.index(elements) < 0:
        raise ValueError(
            f"members={members}, elements={elements}: expected at least one member, and no fewer "
            "than 0 elements"
        )
    reduction = as_reduction(reduction)
    check_room(fold_spec(reduction), members)
    values = value_format(dtype)
    sent = _Values(carrier(values), _width(values))
    return _bits(reduction, members, elements, sent, sent.width, gathered) / 8 / members


class Traffic(NamedTuple):
    """Bytes that each member sends for a sum, and whether a wire is as it is named.

    `unrounded` are the bytes without any wire. `block` is the wire's, and `shortest` what the
    shortest message has, where that is less.
    """

    bytes_sent: float
    unrounded: float
    block: int | None = None
    shortest: int | None = None

    @property
    def short_blocks(self) -> bool:
        """Whether messages are shorter than the wire's blocks."""
        return self.shortest is not None

    @property
    def more_bytes(self) -> bool:
        """Whether the wire sends more than values that are not rounded."""
        return self.bytes_sent > self.unrounded

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences about what makes this an artefact."""
        found = []
        if self.shortest is not None:
            few = "1 element" if self.shortest == 1 else f"{self.shortest} elements"
            found.append(f"messages of {few} are shorter than the wire's blocks of {self.block}")
        if self.more_bytes:
            times = self.bytes_sent / self.unrounded
            found.append(f"the wire sends {times:.3g} times the bytes of unrounded values")
        return tuple(found)


def traffic_of(
    reduction: Reduction, members: int, elements: int, dtype: DTypeLike | FormatLike
) -> Traffic:
    """The traffic of a sum, and its artefacts.

    >>> from gpusim import Reduction, Wire
    >>> ring = Reduction(order="ring", wire=Wire("int8", "amax", 64))
    >>> for each in traffic_of(ring, 2048, 4096, "float32").problems:
    ...     print(each)
    messages of 2 elements are shorter than the wire's blocks of 64
    >>> traffic_of(ring, 4096, 4096, "float32").problems[1]
    'the wire sends 1.25 times the bytes of unrounded values'
    """
    values = value_format(dtype)
    sent = _Values(carrier(values), _width(values))
    short = [
        (min(lengths), wire.block)
        for wire, lengths in _messages(reduction, members, elements, sent)
        if wire.scale is not None and isinstance(wire.block, int) and min(lengths) < wire.block
    ]
    shortest, block = min(short, default=(None, None))
    numbers = (members, elements, dtype)
    return Traffic(
        bytes_sent(reduction, *numbers),
        bytes_sent(_unrounded(reduction), *numbers),
        block,
        shortest,
    )


def _unrounded(reduction: Reduction) -> Reduction:
    across = None if reduction.across is None else _unrounded(reduction.across)
    return replace(reduction, wire=None, across=across)


def _messages(
    reduction: Reduction, members: int, elements: int, values: _Values
) -> Iterator[tuple[Wire, list[int]]]:
    """The wires of all levels in which anything is sent, and the lengths of their messages."""
    inner = replace(reduction, groups_of=None, across=None)
    size = min(reduction.groups_of or members, members)
    edges = _edges(inner, size, elements, values)
    lengths = sorted({b - a for a, b in pairwise(edges)})
    wire = as_wire(inner.wire)
    if wire is not None and size > 1 and lengths:
        yield wire, lengths
    if reduction.across is None:
        return
    groups = -(-members // size)
    held = _held(inner, size, elements, values)
    for length in lengths:
        yield from _messages(reduction.across, groups, length, held)


class _Values(NamedTuple):
    """The members of a level: the dtype that holds them, and the bits of one."""

    dtype: np.dtype[Any]
    width: int


def _bits(
    reduction: Reduction, members: int, elements: int, values: _Values, result: int, gathered: bool
) -> int:
    """The bits that all members send; `result` are those of an element of the result."""
    inner = replace(reduction, groups_of=None, across=None)
    size = reduction.groups_of or members
    counts = [min(size, members - first) for first in range(0, members, size)]
    bits = sum((count - 1) * _summed(inner, count, elements, values) for count in counts)
    if gathered:  # cut as for the first group
        sent = _sent_round(reduction, counts[0], elements, values, result)
        bits += (members - len(counts)) * sent
    across = reduction.across
    if across is None:
        return bits
    held = _held(inner, counts[0], elements, values)
    if isinstance(inner.accumulate, Format) and across.accumulate is None:
        if not (across.order == FIXED or is_exact(across.order)):
            across = replace(across, accumulate=inner.accumulate)
    for a, b in pairwise(_edges(inner, counts[0], elements, values)):  # each is folded alone
        bits += _bits(across, len(counts), b - a, held, result, gathered)
    return bits


def _summed(reduction: Reduction, members: int, elements: int, values: _Values) -> int:
    """The bits of a value that is sent to be added."""
    wire = as_wire(reduction.wire)
    if wire is not None and wire.at != "result":
        return _message(wire, reduction, members, elements, values)
    if reduction.order == FIXED:
        return _integers(reduction, elements)
    if is_exact(reduction.order) or reduction.order in COMPENSATED:
        return elements * values.width
    return elements * _held(reduction, members, elements, values).width


def _sent_round(
    reduction: Reduction, members: int, elements: int, values: _Values, result: int
) -> int:
    """The bits of a result that is sent round."""
    wire = as_wire(reduction.wire)
    if wire is not None and wire.at != "members":
        return _message(wire, reduction, members, elements, values)
    if reduction.order == FIXED and reduction.across is None:
        return _integers(reduction, elements)
    return elements * result


def _integers(reduction: Reduction, elements: int) -> int:
    """The bits of a value in integers, with the exponents of its blocks' units."""
    width = FIXED_TYPES[str(reduction.accumulate or "int32")]
    return elements * width + 8 * -(-elements // UNIT_BLOCK)


def _message(wire: Wire, reduction: Reduction, members: int, elements: int, values: _Values) -> int:
    """The bits of a value on the wire, with its scales."""
    if wire.block == "row":
        raise ValueError("wire block='row': expected a number, as a value has no rows here")
    if wire.scale is None:
        return elements * wire.bits
    edges = _edges(reduction, members, elements, values)
    scales = len(wire.info.starts(edges, elements)) * wire.scale_bits
    return elements * wire.bits + scales + (len(edges) - 1) * wire.message_bits


def _held(reduction: Reduction, members: int, elements: int, values: _Values) -> _Values:
    """The partial sums."""
    if isinstance(reduction.accumulate, Format):
        return _Values(reduction.accumulate.carrier, reduction.accumulate.bits)
    spec = replace(fold_spec(reduction), out_dtype=values.dtype)
    held = accumulator_of(spec, values.dtype, members, (1, elements))
    assert not isinstance(held, FormatInfo)
    return _Values(held, 8 * held.itemsize)


def _width(given: ValueFormat) -> int:
    return given.bits if isinstance(given, Format) else 8 * given.itemsize


def _edges(reduction: Reduction, members: int, elements: int, values: _Values) -> list[int]:
    """Where the messages of an order begin and end."""
    spec = fold_spec(reduction)
    return sorted(
        {*edges_of(spec, plan_of(spec, values.dtype, members, (1, elements)), values.dtype)}
    )
