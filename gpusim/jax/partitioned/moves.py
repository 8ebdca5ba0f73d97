"""Reductions by which XLA's partitioner moves data: one device has the elements, the others zeros.

Their result is exact in any order, but not through a narrow wire or accumulator. So they stay
XLA's.
"""

from __future__ import annotations

import re
from typing import Any

from gpusim.jax import private

ADDING = (
    "add", "add_any", "all_reduce", "conv_general_dilated", "cumsum", "dot", "dot_general",
    "psum", "psum_invariant", "ragged_dot", "ragged_dot_general", "reduce", "reduce_sum",
    "reduce_window", "reduce_window_sum", "scatter-add", "scatter_add", "segment_sum",
    "select_and_scatter_add", "unreduced_psum",
)  # fmt: skip
"""Operations that add. A mask before them is the program's."""

SAME = (
    "mhlo.copy", "stablehlo.bitcast_convert", "stablehlo.convert", "stablehlo.copy",
    "stablehlo.reshape", "stablehlo.slice", "stablehlo.transpose",
)  # fmt: skip
"""Operations that leave zeros zeros, and one device's elements what they are."""

SPLAT = re.compile(r"dense<\(?(?P<value>-?[\d.]+(e[+-]?\d+)?(, ?-?[\d.]+(e[+-]?\d+)?)?)\)?> :")
"""A constant whose elements are all one number, real or complex."""


def moves_data(reduction: Any, source: str) -> bool:
    """Whether a sum between devices adds zeros to one device's elements.

    **Arguments**: `reduction` is the operation; `source` names the program's, as
    jit(f)/dynamic_slice.
    """
    if source.rsplit("/", 1)[-1].split("[")[0] in ADDING:
        return False
    return all(map(is_masked, reduction.operands))


def is_masked(value: Any) -> bool:
    """Whether a value is an array with zeros wherever a mask or an update leaves it."""
    operation = maker(value)
    while operation is not None and operation.name in SAME:
        value = operation.operands[0]
        operation = maker(value)
    if operation is None:
        return False
    if operation.name == "stablehlo.select":
        return any(map(is_zero, [*operation.operands][1:]))
    if operation.name == "stablehlo.dynamic_update_slice":
        return is_zero(operation.operands[0]) or is_masked(operation.operands[0])
    if operation.name == "stablehlo.pad":
        return is_zero(operation.operands[1])
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
