"""The settings of a wire, and its formats that are not floating-point."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arguments import check_rounding
from .formats import SUB_32_BIT, FormatInfo, NumberFormat, check_float, is_sub_32_bit

__all__ = ["AT", "INTEGERS", "NVFP4", "SCALES", "WireInfo", "fixed_point"]

#: How the scale of a block follows from its largest magnitude, in the order of the kernels' enum.
SCALES = (None, "amax", "floor", "ceil", "even")
#: Scales of two levels: of blocks in float8_e4m3fn, in units of the message's own.
NVFP4 = "nvfp4"
AT = ("hops", "ends", "members", "result")


def fixed_point(bits: int, fraction_bits: int = 0) -> FormatInfo:
    """The numbers k / 2**fraction_bits of `bits` bits, of equal magnitudes on both sides of zero.

    >>> fixed_point(8).largest, fixed_point(8, 6).largest
    (127.0, 1.984375)
    """
    steps, unit = 2 ** (bits - 1) - 1, 2.0**-fraction_bits
    width = bits - 2  # of the largest number, the leading bit not counted
    largest = steps * unit
    return FormatInfo(
        width, width - fraction_bits, unit, largest, -largest, False, False, sub_32_bit=True
    )


#: Formats of wires that are not floating-point, by name.
INTEGERS = {"int8": fixed_point(8), "int4": fixed_point(4)}


@dataclass(frozen=True)
class WireInfo:
    """The form in which members send values, as the kernels take it.

    **Arguments**:

    - `format`: a floating-point dtype, or a FormatInfo of a signed format.
    - `scale`: one of `SCALES`, `NVFP4`, or a number that float32 holds.
    - `block`: the number of consecutive elements with one scale, "row", or None for a message.
    - `rounding`: "nearest" or "stochastic".
    - `at`: one of `AT`.

    **Raises**: ValueError and TypeError for fields outside these.
    """

    format: NumberFormat
    scale: str | float | None = None
    block: int | str | None = None
    rounding: str = "nearest"
    at: str = "hops"

    def __post_init__(self) -> None:
        if not isinstance(self.format, FormatInfo):
            object.__setattr__(self, "format", np.dtype(self.format))
            check_float("wire", np.dtype(self.format), ", or a Format")
        elif not self.format.lowest < 0:
            raise ValueError("wire of an unsigned format: expected one of both signs")
        self._check_scale()
        if self.at not in AT:
            expected = ", ".join(map(repr, AT))
            raise ValueError(f"wire at={self.at!r}: expected one of {expected}")
        check_rounding(self.rounding)
        block = self.block
        whole = int(block) if isinstance(block, (int, np.integer)) and block is not True else 0
        if whole > 0:
            object.__setattr__(self, "block", whole)
        elif block not in (None, "row"):
            raise ValueError(
                f"wire block={block!r}: expected a positive number of elements, 'row' or None"
            )
        if block is not None and self.scale is None:
            raise ValueError(f"wire block={block!r}: expected a scale beside it")
        if self.scale is not None and not is_sub_32_bit(self.format):
            raise ValueError(
                f"wire scale={self.scale!r}: expected a format of fewer bits than float32, got "
                f"{self.format}"
            )
        if self.is_given and self.block is not None:
            raise ValueError(
                f"wire block={block!r}, scale={self.scale!r}: expected no block, as all elements "
                "have the given scale"
            )
        if self.scale == NVFP4 and not (isinstance(self.block, int) and self._is_e2m1):
            raise ValueError(
                f"wire scale='nvfp4', block={block!r}: expected the format 'float4_e2m1fn' and a "
                "number of elements"
            )

    def _check_scale(self) -> None:
        scale: Any = self.scale
        if isinstance(scale, (int, float, np.number)) and not isinstance(scale, (bool, complex)):
            with np.errstate(all="ignore"):
                value = float(np.float32(scale))
            if not 0 < value < math.inf:
                raise ValueError(
                    f"wire scale={scale!r}: expected a number above zero that float32 holds"
                )
            object.__setattr__(self, "scale", value)
        elif not (scale is None or (isinstance(scale, str) and scale in (*SCALES, NVFP4))):
            expected = ", ".join(map(repr, (*SCALES, NVFP4)))
            raise ValueError(f"wire scale={scale!r}: expected one of {expected}, or a number")

    @property
    def _is_e2m1(self) -> bool:
        info = self.info
        return info is not None and (info.largest, info.smallest) == (6, 0.5)

    @property
    def is_given(self) -> bool:
        """Whether the scale is a number, and does not depend on what is sent."""
        return isinstance(self.scale, float)

    @property
    def is_compiled(self) -> bool:
        """Whether the compiled kernels and the GPU's have its scales."""
        return self.scale in SCALES

    @property
    def info(self) -> FormatInfo | None:
        """The format's numbers; None for float32 and float64."""
        return self.format if isinstance(self.format, FormatInfo) else SUB_32_BIT.get(self.format)

    @property
    def draws(self) -> bool:
        """Whether rounding takes random numbers."""
        return self.rounding == "stochastic" and is_sub_32_bit(self.format)

    @property
    def at_hops(self) -> bool:
        """Whether partial sums are rounded."""
        return self.at == "hops"

    @property
    def at_members(self) -> bool:
        """Whether the members' own values are rounded."""
        return self.at in ("ends", "members")

    @property
    def at_result(self) -> bool:
        """Whether a result that is sent round is rounded."""
        return self.at in ("hops", "ends", "result")

    def starts(self, edges: list[int], row: int, first: int = 0) -> NDArray[np.intp]:
        """Where blocks of one scale begin, in messages from edges[k] to edges[k + 1].

        `first` elements of the value, whose rows have `row`, lie before these.
        """
        if self.block is None or len(edges) < 2:
            return np.array(edges[:-1], np.intp)
        length = max(1, row) if self.block == "row" else int(self.block)
        if self.block == "row":
            rows = range(-first % length, edges[-1], length)
            return np.array(sorted({*edges[:-1], *rows}), np.intp)
        return np.concatenate([np.arange(a, b, length) for a, b in pairwise(edges)]).astype(np.intp)
