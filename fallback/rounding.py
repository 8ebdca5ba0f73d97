"""One correct rounding from float32 or float64 to a narrower format, nearest or stochastic.
Values stay in the computing type: afterwards they are exactly representable in the format."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fallback import limits
from fallback.formats import BFLOAT16, FLOAT32, FLOAT64, NARROW, Format, computing_dtype, kind_of
from fallback.general import Grid, GridRounder
from fallback.layout import split, whole
from fallback.philox import Lanes
from fallback.subnormals import require_subnormals

_EXPONENT_MASK: dict[np.dtype[Any], np.generic] = {
    FLOAT32: np.uint32(0x7F80_0000),
    FLOAT64: np.uint64(0x7FF0_0000_0000_0000),
}
_SIGN_MASK: dict[np.dtype[Any], np.generic] = {
    FLOAT32: np.uint32(1 << 31),
    FLOAT64: np.uint64(1 << 63),
}
_FRACTION_BITS = {FLOAT32: 23, FLOAT64: 52}
_UNSIGNED: dict[np.dtype[Any], np.dtype[Any]] = {
    FLOAT32: np.dtype(np.uint32),
    FLOAT64: np.dtype(np.uint64),
}


def binade(magnitudes: NDArray[Any], target: Format) -> NDArray[Any]:
    """The power of two at or below each magnitude, kept within `target`'s normal exponents.

    Below them the spacing of the format no longer shrinks; above them any spacing serves, because
    every result overflows.
    """
    dtype = magnitudes.dtype
    bits = magnitudes.view(_UNSIGNED[dtype]) & _EXPONENT_MASK[dtype]
    powers: NDArray[Any] = bits.view(dtype)
    low, high = 2.0**target.min_exponent, 2.0**target.max_exponent
    return np.clip(powers, dtype.type(low), dtype.type(high), out=powers)


def round_to_grid(magnitudes: NDArray[Any], powers: NDArray[Any], fraction_bits: int) -> None:
    """Round in place to multiples of power * 2**-fraction_bits, ties to the even multiple.

    Adding a number whose unit in the last place is the grid's spacing makes the addition round.
    """
    dtype = magnitudes.dtype
    magic = powers * dtype.type(2.0 ** (_FRACTION_BITS[dtype] - fraction_bits))
    np.add(magnitudes, magic, out=magnitudes)
    np.subtract(magnitudes, magic, out=magnitudes)


def _nearest(magnitudes: NDArray[Any], target: Format) -> None:
    round_to_grid(magnitudes, binade(magnitudes, target), target.fraction_bits)


def _stochastic(magnitudes: NDArray[Any], target: Format, lanes: NDArray[np.uint32]) -> None:
    """Go up to `hi` where lane < floor(p * 2**32). All arithmetic here is exact but the compare."""
    dtype = magnitudes.dtype
    powers = binade(magnitudes, target)
    ulps = powers * dtype.type(2.0**-target.fraction_bits)
    low = magnitudes.copy()
    round_to_grid(low, powers, target.fraction_bits)
    low -= ulps * (low > magnitudes)  # a product: NumPy's where= takes twenty times as long
    share = magnitudes - low
    share *= dtype.type(2.0 ** (32 + target.fraction_bits))
    share /= powers
    low += ulps * (lanes < share.astype(np.uint32))
    magnitudes[...] = low


def round_block(block: NDArray[Any], target: Format, lanes: NDArray[np.uint32] | None) -> None:
    """Round a C-contiguous float32 or float64 block to `target`, in place.

    `lanes`, which broadcast to the block's shape, are the uniform numbers of stochastic rounding;
    None: nearest.
    """
    if target.dtype == BFLOAT16 and block.dtype == FLOAT32:
        # Both have float32's exponents, so the grid's magic number would overflow.
        _round_float32_to_bfloat16(block, lanes)
        return
    magnitudes = np.abs(block)
    if lanes is None:
        _nearest(magnitudes, target)
    else:
        _stochastic(magnitudes, target, lanes)
    beyond = magnitudes > target.max_finite
    if beyond.any():
        magnitudes[beyond] = target.overflow
    bits = block.view(_UNSIGNED[block.dtype])
    bits &= _SIGN_MASK[block.dtype]
    bits |= magnitudes.view(bits.dtype)
    if not target.has_negative_zero:
        block += block.dtype.type(0)


def _round_float32_to_bfloat16(block: NDArray[Any], lanes: NDArray[np.uint32] | None) -> None:
    """bfloat16 is float32's upper half: a carry out of the lower half rounds up, to infinity too.

    NaNs are set aside, since their payload may sit in the lower half only.
    """
    bits = block.view(np.uint32)
    nans = np.isnan(block)
    if lanes is None:
        even = (bits >> np.uint32(16)) & np.uint32(1)
        even += np.uint32(0x7FFF)
        bits += even
    else:
        rises = lanes < (bits << np.uint32(16))
        bits += rises.astype(np.uint32) << np.uint32(16)
    bits &= np.uint32(0xFFFF_0000)
    if nans.any():
        block[nans] = np.nan


class Rounder(Protocol):
    """Rounds C-contiguous blocks of the computing type in place, which holds the target's values.

    Nothing happens where `exact` is true. Where `stochastic` is true it takes lanes, which
    broadcast against the block; without them it rounds to nearest.
    """

    exact: bool
    stochastic: bool

    def __call__(self, block: NDArray[Any], lanes: NDArray[np.uint32] | None) -> None: ...


def rounder(computing: np.dtype[Any], target: np.dtype[Any] | Grid, stochastic: bool) -> Rounder:
    """The Rounder for a dtype, or for any format."""
    if isinstance(target, Grid):
        return GridRounder(target, stochastic)
    return DtypeRounder(computing, target, stochastic)


class DtypeRounder:
    """Rounds blocks of the computing type to one target dtype."""

    def __init__(self, computing: np.dtype[Any], target: np.dtype[Any], stochastic: bool) -> None:
        self._narrow = NARROW.get(target) if computing in _UNSIGNED else None
        self._single = target == FLOAT32 and computing == FLOAT64
        # From float64 the casts of ml_dtypes round twice, by way of float32.
        self._target, self._by_cast = target, computing == FLOAT32 and self._narrow is not None
        self.exact = self._narrow is None and not self._single
        self.stochastic = stochastic and self._narrow is not None

    def __call__(self, block: NDArray[Any], lanes: NDArray[np.uint32] | None) -> None:
        if self._by_cast and lanes is None and block.size < limits.CAST_WIDTH:
            block[...] = block.astype(self._target)
        elif self._narrow is not None:
            round_block(block, self._narrow, lanes)
        elif self._single:
            block[...] = block.astype(np.float32)


def check_rounding(rounding: str) -> bool:
    """True for "stochastic", False for "nearest", ValueError for anything else."""
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding={rounding!r}: expected 'nearest' or 'stochastic'")
    return rounding == "stochastic"


def check_counter(name: str, value: int) -> int:
    """A 64-bit word of the generator's key or counter, as int; ValueError outside its range."""
    if not 0 <= int(value) < 2**64:
        raise ValueError(f"{name}={value!r}: expected an integer from 0 to 2**64 - 1")
    return int(value)


def round_to(
    x: ArrayLike,
    dtype: DTypeLike | Grid,
    *,
    rounding: str = "nearest",
    seed: int = 0,
    step: int = 1,
    call: int = 0,
    place: int = 0,
    batch_ndim: int = 0,
) -> NDArray[Any]:
    """Convert `x` to the floating-point `dtype` in one correct rounding.

    `x` has any floating-point dtype and any shape; the result is a new C-contiguous array of the
    same shape. `rounding` is "nearest" (ties to even) or "stochastic", which decides between the
    two neighbours by the Philox lane of the element's flat index in (seed, step, call, place).
    Rounding to float32 and float64 is always to nearest. A `Grid` in the place of the dtype stands
    for any format; its values are returned in its carrier. The `batch_ndim` leading axes count
    values which are rounded each by itself, with the same lanes. TypeError for dtypes that are not
    floating-point ones; ValueError for a seed or counter that is not a 64-bit word.

    >>> import ml_dtypes, numpy as np
    >>> round_to(np.array([1.0, 1.01, 1e40]), ml_dtypes.bfloat16).tolist()
    [1.0, 1.0078125, inf]
    >>> round_to(np.full(6, 1.25), ml_dtypes.float8_e5m2, rounding="stochastic").tolist()
    [1.25, 1.25, 1.25, 1.25, 1.25, 1.25]
    """
    stochastic = check_rounding(rounding)
    counters = {"seed": seed, "step": step, "call": call, "place": place}
    words = {name: check_counter(name, value) for name, value in counters.items()}
    values = np.asarray(x)
    target = dtype if isinstance(dtype, Grid) else np.dtype(dtype)
    held = target.carrier if isinstance(target, Grid) else target
    for name, given in (("x", values.dtype), ("dtype", held)):
        if kind_of(given) != "float":
            raise TypeError(f"{name}: {given} given, expected a floating-point dtype")
    require_subnormals()
    # A grid held in float64 is rounded to in float64; no dtype but float64 itself asks for that.
    computing = computing_dtype(values.dtype, held if isinstance(target, Grid) else values.dtype)
    round_part = rounder(computing, target, stochastic)
    lanes = Lanes(words["seed"], words["call"])
    out = np.empty(values.shape, held)
    batch, size = math.prod(values.shape[:batch_ndim]), math.prod(values.shape[batch_ndim:])
    sources, results = values.reshape(batch, size), out.reshape(batch, size)
    with np.errstate(all="ignore"):
        for box in split(whole((size,)), limits.BLOCK):
            drawn = None
            if round_part.stochastic:
                drawn = np.empty(box[0].stop - box[0].start, np.uint32)
                lanes.fill(drawn, start=box[0].start, step=words["step"], place=words["place"])
            for part in split((*whole((batch,)), *box), limits.BLOCK):
                block = sources[part].astype(computing, order="C")
                round_part(block, drawn)
                results[part] = block
    return out
