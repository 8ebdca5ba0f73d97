"""Values on their way from one member to another: rounded, often with a scale by block.
The contract is in docs/numerics.md, "On the wire"."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import kernels, limits
from .decode import decode, encode
from .formats import (
    FLOAT64,
    SUB_32_BIT,
    FormatInfo,
    NumberFormat,
    check_float,
    computing_dtype,
)
from .philox import Lanes
from .rounding import (
    check_counter,
    check_places,
    round_block,
    rounder,
)
from .subnormals import require_subnormals
from .wire_info import AT, INTEGERS, NVFP4, SCALES, WireInfo, fixed_point
from .workspace import own_workspace

__all__ = [
    "AT",
    "INTEGERS",
    "NVFP4",
    "SCALES",
    "WireInfo",
    "arrived",
    "fixed_point",
    "round_message",
    "round_to_wire",
]

LEAST_SCALE = 2.0**-149
E4M3_DTYPE, E4M3 = next(
    (dtype, info) for dtype, info in SUB_32_BIT.items() if dtype.name == "float8_e4m3fn"
)
E2M1_LARGEST = 6.0
LEAST_EXPONENT, MOST_EXPONENT = -127, 127


def round_message(
    values: NDArray[Any],
    wire: WireInfo,
    starts: NDArray[np.intp],
    lanes: NDArray[np.uint32] | None,
    messages: NDArray[np.intp] | None = None,
) -> NDArray[Any]:
    """The values (batch, elements), float32 or float64, as they arrive; it may spoil them.

    `starts` are the first elements of the blocks that have one scale, `lanes` the random numbers.
    `messages` are the first elements of messages, for scales of two levels; None: it is one.
    """
    computing = values.dtype
    info = wire.info
    if info is not None and info.carrier == FLOAT64:
        computing = FLOAT64
    rows = values.astype(computing, copy=False)
    if not rows.size:
        return rows.astype(values.dtype, copy=False)
    compiled = kernels.compiled()
    compiled = compiled if wire.is_compiled else None
    if compiled is not None and compiled.send(rows, wire, starts, lanes):
        return rows if computing == values.dtype else rows.astype(values.dtype)
    rounding = _rounder(wire, computing)
    if wire.scale is None:
        _round(rows, rounding, lanes)
        return rows if computing == values.dtype else rows.astype(values.dtype)
    assert info is not None
    spread, units = _spread(rows, wire, info, starts, messages)
    rows /= spread if units is None else _not_zero(spread * units)
    np.clip(rows, info.lowest, info.largest, out=rows)  # keeps NaN
    _round(rows, rounding, lanes)
    rows *= spread
    if units is not None:
        rows *= units
    return rows if computing == values.dtype else rows.astype(values.dtype)


def round_to_wire(
    x: ArrayLike,
    wire: WireInfo,
    *,
    rounding: str = "nearest",
    seed: int = 0,
    step: int = 1,
    call: int = 0,
    place: ArrayLike = 0,
    batch_ndim: int = 0,
) -> NDArray[Any]:
    """Values that are sent, each whole, as they arrive: `fallback.round_to` for a wire.

    The result has the dtype of `x`. `rounding` is the wire's own. Other arguments and errors are
    those of `round_to`.

    >>> wire = WireInfo(INTEGERS["int4"], "amax")
    >>> round_to_wire(np.array([7.0, 2.2, -0.4], np.float32), wire).tolist()
    [7.0, 2.0, 0.0]
    """
    require_subnormals()
    values = np.asarray(x)
    check_float("x", values.dtype)
    batch, shape = values.shape[:batch_ndim], values.shape[batch_ndim:]
    common, places = check_places(place, batch)
    lanes = Lanes(check_counter("seed", seed), check_counter("call", call))
    entries, elements = math.prod(batch), math.prod(shape)
    rows = np.empty((entries, elements), computing_dtype(values.dtype))
    decode(values.reshape(rows.shape), rows)
    drawn = None
    if wire.draws and rows.size:
        at = [common] * entries if places is None else places.reshape(-1).tolist()
        drawn = np.stack(
            [lanes.draw(elements, start=0, step=step, batch_offset=each) for each in at]
        )
    with np.errstate(all="ignore"):
        starts = wire.starts([0, elements] if elements else [0], shape[-1] if shape else 1)
        sent = arrived(round_message(rows, wire, starts, drawn), values.dtype)
    out = np.empty(rows.shape, values.dtype)
    encode(sent, out, own_workspace(limits.BLOCK))
    return out.reshape(values.shape)


def _round(rows: NDArray[Any], rounding: Any, lanes: NDArray[np.uint32] | None) -> None:
    workspace = own_workspace(limits.BLOCK)
    for start in range(0, rows.size, limits.BLOCK):
        block = rows.reshape(-1)[start : start + limits.BLOCK]
        drawn = None if lanes is None else lanes.reshape(-1)[start : start + limits.BLOCK]
        rounding(block, drawn, workspace)


def _rounder(wire: WireInfo, computing: np.dtype[Any]) -> Any:
    """A Rounder for the wire's format: the one of dtypes also for formats that are like them."""
    info = wire.info
    if not isinstance(info, FormatInfo) or info.dtype is not None or wire.draws:
        return rounder(computing, wire.format, wire.draws)
    alike = info.fraction_bits and info.smallest == 2.0**info.min_ulp and info.largest < 2.0**127
    if not alike or info.lowest != -info.largest:
        return rounder(computing, wire.format, False)
    return lambda block, _, workspace: round_block(block, info, None, workspace)


def _largest(
    rows: NDArray[Any], starts: NDArray[np.intp], lengths: NDArray[np.intp]
) -> NDArray[Any]:
    """The largest magnitude of each block, NaN if it has one."""
    magnitudes = np.abs(rows)
    length, last = int(lengths[0]), int(lengths[-1])
    if not length & (length - 1) and last <= length and (lengths[:-1] == length).all():
        # Neighbours in pairs: NumPy's loop for each block would take longer.
        whole = magnitudes[:, : rows.shape[1] // length * length]
        while length > 1:
            whole = np.maximum(whole[:, ::2], whole[:, 1::2])
            length //= 2
        if whole.shape[1] < len(starts):
            rest = magnitudes[:, -last:].max(axis=1, keepdims=True)
            whole = np.concatenate([whole, rest], axis=1)
        return whole
    found: NDArray[Any] = np.maximum.reduceat(magnitudes, starts, axis=1)
    return found


def _spread(
    rows: NDArray[Any],
    wire: WireInfo,
    info: FormatInfo,
    starts: NDArray[np.intp],
    messages: NDArray[np.intp] | None,
) -> tuple[Any, NDArray[Any] | None]:
    """The scale of each element, and the unit that it is in, where scales have two levels."""
    if isinstance(wire.scale, float):
        return rows.dtype.type(wire.scale), None
    lengths = np.diff(starts, append=rows.shape[1])
    largest = _largest(rows, starts, lengths)
    if wire.scale != NVFP4:
        return np.repeat(_scales(largest, str(wire.scale), info), lengths, axis=1), None
    begins = np.zeros(1, np.intp) if messages is None else messages
    sizes = np.diff(begins, append=rows.shape[1])
    places = np.searchsorted(starts, begins)
    most = np.maximum.reduceat(largest, places, axis=1)
    units = _units(most)
    blocks = np.repeat(units, np.diff(places, append=len(starts)), axis=1)
    scales = _block_scales(largest, blocks)
    return np.repeat(scales, lengths, axis=1), np.repeat(units, sizes, axis=1)


def _not_zero(scales: NDArray[Any]) -> NDArray[Any]:
    """Infinity where a scale is zero: elements of a block that small arrive as zeros."""
    scales[scales == 0] = math.inf
    return scales


def _units(amax: NDArray[Any]) -> NDArray[Any]:
    """The scale of each message: with it, the largest block's own is float8_e4m3fn's largest."""
    quotient = (amax / amax.dtype.type(E2M1_LARGEST * E4M3.largest)).astype(np.float32)
    units = np.maximum(quotient, np.float32(LEAST_SCALE)).astype(amax.dtype)
    units[~np.isfinite(units)] = math.nan
    return units


def _block_scales(amax: NDArray[Any], units: NDArray[Any]) -> NDArray[Any]:
    """The scale of each block in its message's units, a number of float8_e4m3fn."""
    scales = amax / amax.dtype.type(E2M1_LARGEST)
    scales /= units
    np.minimum(scales, amax.dtype.type(E4M3.largest), out=scales)  # keeps NaN
    _round(scales, rounder(scales.dtype, E4M3_DTYPE, False), None)
    return scales


def _scales(amax: NDArray[Any], rule: str, info: FormatInfo) -> NDArray[Any]:
    """The scale of each block; 1 for zeros, and NaN where a block arrives as NaN."""
    finite = np.isfinite(amax)
    magnitudes = np.where(finite & (amax > 0), amax, amax.dtype.type(1))
    if rule == "amax":
        quotient = (magnitudes / amax.dtype.type(info.largest)).astype(np.float32)
        scales = np.maximum(quotient, np.float32(LEAST_SCALE)).astype(amax.dtype)
        finite &= np.isfinite(scales)
    else:
        exponents = _exponents(magnitudes, rule, info)
        scales = np.ldexp(amax.dtype.type(1), exponents)
    scales[amax == 0] = 1
    scales[~finite] = math.nan
    return scales


def _exponents(amax: NDArray[Any], rule: str, info: FormatInfo) -> NDArray[np.int32]:
    """The exponents of scales that are powers of two."""
    fractions, exponents = np.frexp(amax)  # a fraction of 1/2 is a power of two
    exponents = exponents - 1
    if rule == "ceil":
        exponents = exponents + (fractions > 0.5)
    elif rule == "even":
        steps = 2.0 ** (info.fraction_bits + 1)
        exponents = exponents + (np.rint(fractions * steps) == steps)
    exponents = exponents - info.max_exponent
    return np.clip(exponents, LEAST_EXPONENT, MOST_EXPONENT).astype(np.int32)


def arrived(values: NDArray[Any], held: NumberFormat) -> NDArray[Any]:
    """Values in the computing type, converted to the receiver's format to nearest, in place."""
    to_held = rounder(values.dtype, held, False)
    if not to_held.exact:
        _round(values, to_held, None)
    return values
