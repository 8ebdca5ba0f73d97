"""Reductions by which XLA's partitioner moves data: one device has the elements, the others zeros.

Their result is exact in any order, but not through a narrow wire or accumulator. So they stay
XLA's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gpusim.jax import private

OWN = (
    "all_reduce", "psum", "psum_invariant", "psum_scatter", "reduce_scatter", "unreduced_psum",
    "unreduced_reduce_scatter",
)  # fmt: skip
"""Reductions that the program asks for itself: a mask in front of them is the program's."""

SAME = (
    "mhlo.copy", "stablehlo.bitcast_convert", "stablehlo.convert", "stablehlo.copy",
    "stablehlo.reshape", "stablehlo.slice", "stablehlo.transpose",
)  # fmt: skip
"""Operations that leave zeros zeros, and one device's elements what they are."""

SPLAT = re.compile(r"dense<\(?(?P<value>-?[\d.]+(e[+-]?\d+)?(, ?-?[\d.]+(e[+-]?\d+)?)?)\)?> :")
"""A constant whose elements are all one number, real or complex."""


def moves_data(reduction: Any, source: str) -> bool:
    """Whether a sum between devices adds zeros to one device's elements.

    In front of the program's sums stands what has added them on a device: a reduce, also of one
    row, a product, a scatter. XLA names its moves by the operation that they are made for.

    **Arguments**: `reduction` is the operation; `source` names the program's, as
    jit(f)/dynamic_slice.
    """
    if source.rsplit("/", 1)[-1].split("[")[0] in OWN:
        return False
    return all(map(is_masked, reduction.operands))


def is_masked(value: Any) -> bool:
    """Whether an array has zeros wherever the device's number says so."""
    operation = maker(value)
    while operation is not None and operation.name in SAME:
        operation = maker(operation.operands[0])
    if operation is None:
        return False
    if operation.name == "stablehlo.select":
        mask, *either = operation.operands
        return any(map(is_zero, either)) and knows_device([mask])
    if operation.name == "stablehlo.dynamic_update_slice":
        target, _, *starts = operation.operands
        return (is_zero(target) or is_masked(target)) and knows_device(starts)
    return False


def knows_device(values: Sequence[Any]) -> bool:
    """Whether one of these values is computed from the device's number."""
    waiting = [maker(value) for value in values]
    seen = set()
    while waiting:
        operation = waiting.pop()
        if operation is None or operation in seen:
            continue
        if operation.name == "stablehlo.partition_id":
            return True
        seen.add(operation)
        waiting += [maker(value) for value in operation.operands]
    return False


def is_zero(value: Any) -> bool:
    """Whether a value is zeros, as the program says them."""
    operation = maker(value)
    while operation is not None and operation.name in (*SAME, "stablehlo.broadcast_in_dim"):
        operation = maker(operation.operands[0])
    if operation is None or operation.name != "stablehlo.constant":
        return False
    # As text: elements that are complex numbers cannot be read in another way.
    splat = SPLAT.search(operation.get_asm(large_elements_limit=1))
    return splat is not None and not any(float(part) for part in splat["value"].split(","))


def maker(value: Any) -> Any:
    """The operation whose result a value is; None for an argument of a block."""
    owner = value.owner
    return None if isinstance(owner, private.ir.Block) else getattr(owner, "operation", owner)
