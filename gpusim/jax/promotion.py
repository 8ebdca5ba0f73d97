"""The conversions around a sum that is to have the bits of XLA:CPU's own.

XLA:CPU adds bfloat16 in float32: its compiler converts the operand before the collective, and the
result behind it. Where the operand is computed in the same program, in float32 too, its simplifier
then drops the operand's rounding to bfloat16. A custom call stops the simplifier, so the twin
`xla-cpu` has the same conversions around gpusim's call in float32.

The 8-bit formats are added in float16, but their roundings stay. The largest and the smallest are
the same with and without a rounding of the operands.
"""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from gpusim.reduction import Reduction

#: XLA:CPU's own. With another field, such as an accumulator, a sum is not XLA's.
XLA = Reduction.like("xla-cpu")


def is_xlas(reduction: Reduction | None) -> bool:
    """Whether a sum is to have the bits of XLA:CPU's own."""
    return reduction == XLA


def promoted(reduction: Reduction | None, dtype: str) -> str | None:
    """The dtype to which operands are converted; None where a call takes them as they are.

    >>> promoted(Reduction.like("xla-cpu"), "bfloat16"), promoted(Reduction(), "bfloat16")
    ('float32', None)
    """
    return "float32" if is_xlas(reduction) and dtype == "bfloat16" else None


def widen(value: Any, dtype: str) -> Any:
    """Convert an `ir.Value` to the dtype of `promoted`, where the context inserts operations."""
    assert dtype == "float32", dtype
    shape = ir.RankedTensorType(value.type).shape
    return stablehlo.convert(ir.RankedTensorType.get(shape, ir.F32Type.get()), value)


def narrow(value: Any, kind: Any) -> Any:
    """Convert an `ir.Value` to the `ir.Type` of the result whose place it takes."""
    return stablehlo.convert(kind, value)
