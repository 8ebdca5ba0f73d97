"""The bytes that a reduction sends: how much of a study's error buys how much traffic."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fallback.formats import default_accumulator
from fallback.orders import ring_bounds
from fallback.schedules import ChainSchedule, compile_order
from gpusim.formats import Format, FormatLike
from gpusim.reduction import Reduction
from gpusim.tools.study.settings import ValueFormat, carrier, value_format
from gpusim.wires import as_wire

__all__ = ["bytes_sent"]


def bytes_sent(
    reduction: Reduction,
    members: int,
    elements: int,
    dtype: DTypeLike | FormatLike,
    *,
    gathered: bool = True,
) -> float:
    """The bytes that each member sends for a sum of values of `elements` elements, on average.

    In every order each addition has one operand sent to it, so that R members send R - 1 times
    what a value takes; members whose own values are sent (a wire at "ends" or "members", "exact",
    "fixed") send as much. The result is sent to R - 1 members. In levels the same holds for each
    group, and across the groups. This is 2 (R - 1) / R values for each member, which is optimal
    (Patarasuk and Yuan, 2009). Scales of blocks are counted: 4 bytes each, 1 for powers of two.

    **Arguments**:

    - `dtype`: of the values, and of the result.
    - `gathered`: False for a psum_scatter, whose result is not sent.

    **Returns**: bytes; codes of fewer than 8 bits are packed.

    **Raises**: ValueError where a twin's order is not known for so many members.

    >>> from gpusim import Reduction, Wire
    >>> bytes_sent(Reduction(order="ring"), 4, 1000, "float32")
    6000.0
    >>> bytes_sent(Reduction(order="ring", wire=Wire("int8", "amax", 100)), 4, 1000, "float32")
    1572.0
    >>> across = Reduction(order="ring", wire="bfloat16")
    >>> bytes_sent(Reduction(order="ring", groups_of=2, across=across), 4, 1000, "float32")
    5000.0
    """
    return _bits(reduction, members, elements, value_format(dtype), gathered) / 8 / members


def _bits(
    reduction: Reduction, members: int, elements: int, values: ValueFormat, gathered: bool
) -> int:
    """The bits that all members send."""
    if reduction.across is None:
        there = _value_bits(reduction, members, elements, values, summed=True)
        back = _value_bits(reduction, members, elements, values, summed=False) if gathered else 0
        return (members - 1) * (there + back)
    size = reduction.groups_of or 1
    counts = [min(size, members - first) for first in range(0, members, size)]
    inner = replace(reduction, groups_of=None, across=None)
    bits = sum(_bits(inner, count, elements, values, gathered) for count in counts)
    for a, b in pairwise(_edges(inner, counts[0], elements, values)):  # each is folded alone
        bits += _bits(reduction.across, len(counts), b - a, values, gathered)
    return bits


def _value_bits(
    reduction: Reduction, members: int, elements: int, values: ValueFormat, *, summed: bool
) -> int:
    """The bits of one value that is sent: to be summed, or as the result."""
    wire = as_wire(reduction.wire)
    if wire is not None and wire.at in ("ends", "hops", "members" if summed else "result"):
        blocks = 0
        if wire.scale is not None:
            edges = _edges(reduction, members, elements, values)
            blocks = len(wire.info.starts(edges, elements))
        return elements * wire.bits + blocks * wire.scale_bits
    held: Any = values
    own = reduction.order in ("exact", "fixed") or (wire is not None and wire.at == "members")
    if summed and not own:
        held = reduction.accumulate or default_accumulator(carrier(values))
    return elements * _width(held)


def _width(given: Any) -> int:
    return given.bits if isinstance(given, Format) else 8 * np.dtype(given).itemsize


def _edges(reduction: Reduction, members: int, elements: int, values: ValueFormat) -> list[int]:
    """Where the messages of an order begin and end."""
    order = reduction.schedule
    if order in ("exact", "fixed"):
        order = "linear"
    itemsize = carrier(values).itemsize
    compiled = compile_order(order, members=members, elements=elements, itemsize=itemsize)
    edges = [0, elements]
    if compiled == "ring":
        edges = ring_bounds(elements, members)
    elif isinstance(compiled, ChainSchedule):
        edges = list(compiled.edges)
    return sorted(set(edges))
