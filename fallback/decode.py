"""Exact conversion of sub-32-bit formats from and to float32, by integer operations on blocks.
NumPy's own conversions of float16 and the 8-bit formats are many times slower."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import limits
from .formats import BFLOAT16, FLOAT32, SUB_32_BIT, FormatInfo
from .workspace import Workspace

_INT32 = np.dtype(np.int32)
_SIGNED: dict[int, np.dtype[Any]] = {1: np.dtype(np.int8), 2: np.dtype(np.int16)}
_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}


class _Bits:
    """How the bits of a sub-32-bit format (not bfloat16) lie in those of a float32 number.

    Shifted up by `shift`, exponent and fraction have the value times 2**-k, and `scale` is 2**k;
    so have subnormal numbers, which become float32's. Codes from `special` on stand for no finite
    number.
    """

    def __init__(self, target: FormatInfo) -> None:
        dtype = np.dtype(target.dtype)
        self.width = 8 * dtype.itemsize
        self.shift = np.int32(23 - target.fraction_bits)
        bias = 1 - target.min_exponent
        self.scale, self.unscale = np.float32(2.0 ** (127 - bias)), np.float32(2.0 ** (bias - 127))
        # The sign, which the shift has copied into the bits between, and what lies below them.
        below = (1 << (self.width - 1 + int(self.shift))) - 1
        self.mask = np.int32(below - (1 << 31))
        self.sign_shift = np.int32(32 - self.width)
        self.sign_mask = np.int32(-(1 << (self.width - 1)))
        largest = np.array(target.largest, dtype)
        self.special = int(largest.view(_UNSIGNED[dtype.itemsize])) + 1
        self.fraction_bits, self.bias = target.fraction_bits, bias
        self.has_negative_zero = target.has_negative_zero
        self.largest = np.float32(target.largest)


_LAYOUT = {dtype: _Bits(row) for dtype, row in SUB_32_BIT.items() if dtype != BFLOAT16}


def decode(source: NDArray[Any], out: NDArray[Any]) -> float:
    """Write the values of `source` into `out`, of its shape; integers wrap, bool means nonzero.

    Returns a bound of their magnitudes: infinity where it is not known, or not all are finite.
    """
    layout = _LAYOUT.get(source.dtype)
    if layout is not None and out.dtype == FLOAT32 and source.size >= limits.CAST_WIDTH:
        return _decode_by_bits(source, out, layout)
    if layout is not None and source.dtype.itemsize == 1:
        np.take(_values(source.dtype, out.dtype), source.view(np.uint8), out=out, mode="clip")
    else:
        np.copyto(out, source, casting="unsafe")
    return math.inf


def decode_all(blocks: NDArray[Any] | list[NDArray[Any]], rows: NDArray[Any]) -> float:
    """`decode` the blocks, stacked or in a list, into as many rows."""
    if isinstance(blocks, np.ndarray):
        return decode(blocks, rows)
    return max(decode(block, row) for block, row in zip(blocks, rows, strict=True))


@cache
def _values(dtype: np.dtype[Any], computing: np.dtype[Any]) -> NDArray[Any]:
    """All 256 values of an 8-bit format."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(computing)


def _decode_by_bits(source: NDArray[Any], out: NDArray[Any], layout: _Bits) -> float:
    """Shift the bits into place, then correct the exponent's bias by a multiplication."""
    codes, bits = source.view(_SIGNED[source.dtype.itemsize]), out.view(_INT32)
    np.copyto(bits, codes)  # the sign fills the upper part
    bits <<= layout.shift
    bits &= layout.mask
    out *= layout.scale
    largest = _largest_code(source, codes, layout)
    if largest < layout.special:
        return math.ldexp(1.0, (largest >> layout.fraction_bits) + 1 - layout.bias)
    if layout.has_negative_zero:
        special = np.abs(out) > layout.largest  # they look like finite numbers beyond the last
    else:
        special = codes == np.iinfo(codes.dtype).min
    out[special] = source[special]
    return math.inf


def _largest_code(source: NDArray[Any], codes: NDArray[Any], layout: _Bits) -> int:
    """The largest code there is, its sign left out; formats without -0 have NaN in its place."""
    positive = int(np.maximum.reduce(codes, axis=None))
    if not layout.has_negative_zero and int(np.minimum.reduce(codes, axis=None)) == -(
        1 << (layout.width - 1)
    ):
        return layout.special
    unsigned = source.view(_UNSIGNED[source.dtype.itemsize])
    negative = int(np.maximum.reduce(unsigned, axis=None)) - (1 << (layout.width - 1))
    return max(positive, negative)


def encode(block: NDArray[Any], out: NDArray[Any], workspace: Workspace) -> None:
    """Write values that are those of `out`'s dtype into it; may spoil `block`."""
    if block.dtype != FLOAT32 or block.size < limits.CAST_WIDTH or out.dtype not in SUB_32_BIT:
        np.copyto(out, block, casting="unsafe")
    elif out.dtype == BFLOAT16:
        bits = block.view(np.uint32)
        bits >>= np.uint32(16)
        np.copyto(out.view(np.uint16), bits, casting="unsafe")
    elif not all_within(block, SUB_32_BIT[out.dtype].largest):
        np.copyto(out, block, casting="unsafe")
    else:
        _encode_by_bits(block, out, _LAYOUT[out.dtype], workspace)


def _encode_by_bits(
    block: NDArray[Any], out: NDArray[Any], layout: _Bits, workspace: Workspace
) -> None:
    block *= layout.unscale
    bits, signs = block.view(_INT32), workspace.take(_INT32, block.shape)
    np.right_shift(bits, layout.sign_shift, out=signs)
    signs &= layout.sign_mask
    bits >>= layout.shift
    bits |= signs
    np.copyto(out.view(_SIGNED[out.dtype.itemsize]), bits, casting="unsafe")
    workspace.give(signs)


def largest_magnitude(block: NDArray[Any]) -> float:
    """The largest magnitude of a block, NaN if there is one."""
    highest = float(np.maximum.reduce(block, axis=None))
    return max(highest, -float(np.minimum.reduce(block, axis=None)))


def all_within(block: NDArray[Any], limit: float) -> bool:
    """Whether all magnitudes are numbers up to `limit`."""
    return largest_magnitude(block) <= limit
