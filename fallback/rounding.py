"""One correct rounding from float32 or float64 to a smaller format, nearest or stochastic.
Values stay in the computing type: afterwards they are exactly representable in the format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from . import kernels, limits, memory, threads
from .arguments import check_batch_offset, check_rounding
from .decode import all_within, encode, largest_magnitude
from .draws import Draws
from .formats import (
    BFLOAT16,
    FLOAT32,
    FLOAT64,
    SUB_32_BIT,
    FormatInfo,
    check_float,
    computing_dtype,
)
from .general import FormatRounder
from .layout import split, whole
from .philox import Lanes
from .subnormals import require_subnormals
from .workspace import Workspace, own_workspace

_UNSIGNED: dict[np.dtype[Any], np.dtype[Any]] = {
    FLOAT32: np.dtype(np.uint32),
    FLOAT64: np.dtype(np.uint64),
}
_EXPONENT_MASK: dict[np.dtype[Any], np.generic] = {
    FLOAT32: np.uint32(0x7F80_0000),
    FLOAT64: np.uint64(0x7FF0_0000_0000_0000),
}
_SIGN_MASK: dict[np.dtype[Any], np.generic] = {
    FLOAT32: np.uint32(1 << 31),
    FLOAT64: np.uint64(1 << 63),
}
_FRACTION_BITS = {FLOAT32: 23, FLOAT64: 52}


def round_block(
    block: NDArray[Any],
    target: FormatInfo,
    lanes: NDArray[np.uint32] | None,
    workspace: Workspace,
    *,
    finite: bool = False,
    on_lattice: bool = False,
) -> None:
    """Round a C-contiguous float32 or float64 block to `target`, in place.

    `lanes`, which broadcast to the block's shape, are the uniform numbers of stochastic rounding;
    None: nearest. `finite` says that no value is beyond the target's largest one, and `on_lattice`
    that all are multiples of its smallest: those below its normal numbers are then its values.
    """
    single, upper_half = block.dtype == FLOAT32, target.dtype == BFLOAT16
    if lanes is None and single and upper_half:
        _nearest_bfloat16(block, workspace)
    elif lanes is None and finite and on_lattice:
        _nearest_on_lattice(block, target, workspace)
    elif lanes is None:
        _nearest(block, target, workspace)
    elif finite and single:
        _stochastic_by_bits(block, target, lanes, workspace, on_lattice or upper_half)
    else:
        _stochastic(block, target, lanes)
    if not target.has_negative_zero:
        block += block.dtype.type(0)


def _binade(values: NDArray[Any], target: FormatInfo, out: NDArray[Any]) -> None:
    """The power of two at or below each magnitude, kept within `target`'s normal exponents.

    Below them the ulp of the format no longer shrinks; above them any ulp serves, because every
    result overflows.
    """
    dtype = values.dtype
    unsigned = _UNSIGNED[dtype]
    np.bitwise_and(values.view(unsigned), _EXPONENT_MASK[dtype], out=out.view(unsigned))
    low, high = 2.0**target.min_exponent, 2.0**target.max_exponent
    np.clip(out, dtype.type(low), dtype.type(high), out=out)


def _nearest(block: NDArray[Any], target: FormatInfo, workspace: Workspace) -> None:
    """Add a number whose ulp is the format's, and subtract it again."""
    dtype = block.dtype
    magic, sums = workspace.take(dtype, block.shape), workspace.take(dtype, block.shape)
    _binade(block, target, magic)
    dropped = _FRACTION_BITS[dtype] - target.fraction_bits
    # One and a half: neither sign of the block leaves the binade of the magic number. If a single
    # bit is dropped, the binade has room for the block's own sign only.
    magic *= dtype.type((1.5 if dropped > 1 else 1.0) * 2.0**dropped)
    if dropped == 1:
        np.copysign(magic, block, out=magic)
    np.add(block, magic, out=sums)
    sums -= magic
    bits = block.view(_UNSIGNED[dtype])
    bits &= _SIGN_MASK[dtype]
    bits |= sums.view(bits.dtype)  # of the same sign, or +0
    workspace.give(magic)
    workspace.give(sums)
    _overflow(block, target)


def _nearest_on_lattice(block: NDArray[Any], target: FormatInfo, workspace: Workspace) -> None:
    """x becomes 2**s x - (2**s x - x) with s the number of bits to drop.

    The first difference is rounded to a multiple of the ulp of 2**s x, which is that of x in the
    format; ties go to even because 2**s x is then an even multiple. (If the difference falls into
    the binade below, its ulp is half as large, but x is next to a power of two, closer than a
    quarter of the ulp.) The second one is exact.
    """
    dtype = block.dtype
    shifted = workspace.take(dtype, block.shape)
    np.multiply(block, _factor(dtype, target), out=shifted)
    np.subtract(shifted, block, out=block)
    np.subtract(shifted, block, out=block)
    workspace.give(shifted)


def _factor(computing: np.dtype[Any], target: FormatInfo) -> np.generic:
    """2**s with s the number of bits that rounding drops."""
    factor: np.generic = computing.type(2.0 ** (_FRACTION_BITS[computing] - target.fraction_bits))
    return factor


def _nearest_bfloat16(block: NDArray[Any], workspace: Workspace) -> None:
    """bfloat16 is float32's upper half: a carry out of the lower half rounds up, to infinity too.

    NaNs are set aside, since their payload may sit in the lower half only.
    """
    nans = np.isnan(block) if np.isnan(np.maximum.reduce(block, axis=None)) else None
    bits = block.view(np.uint32)
    even = workspace.take(bits.dtype, bits.shape)
    np.right_shift(bits, np.uint32(16), out=even)
    even &= np.uint32(1)
    even += np.uint32(0x7FFF)
    bits += even
    bits &= np.uint32(0xFFFF_0000)
    workspace.give(even)
    if nans is not None:
        block[nans] = np.nan


def _stochastic_by_bits(
    block: NDArray[Any],
    target: FormatInfo,
    lanes: NDArray[np.uint32],
    workspace: Workspace,
    on_lattice: bool,
) -> None:
    """Of a finite float32 block drop the last s bits, and go up where the lane's first s are less.

    Adding 2**s - 1 minus the lane's bits carries into the bits that stay just there. The magnitudes
    below the normal numbers have more bits to drop.
    """
    dropped = _FRACTION_BITS[FLOAT32] - target.fraction_bits
    bits = block.view(np.uint32)
    carries = workspace.take(bits.dtype, bits.shape)
    small = None if on_lattice else _below_normal(bits, target, carries)
    if small is not None:
        values = block[small]
        _stochastic(values, target, np.broadcast_to(lanes, block.shape)[small])
    np.invert(lanes, out=carries)
    carries >>= np.uint32(32 - dropped)
    bits += carries
    bits &= np.uint32(2**32 - 2**dropped)
    workspace.give(carries)
    if small is not None:
        block[small] = values


def _below_normal(
    bits: NDArray[np.uint32], target: FormatInfo, scratch: NDArray[np.uint32]
) -> NDArray[np.bool_] | None:
    """A mask of the nonzero magnitudes below the normal numbers; None if there are none."""
    np.bitwise_and(bits, np.uint32(2**31 - 1), out=scratch)
    scratch -= np.uint32(1)  # zeros become the largest
    limit = np.float32(2.0**target.min_exponent).view(np.uint32) - np.uint32(1)
    return scratch < limit if np.minimum.reduce(scratch, axis=None) < limit else None


def _stochastic(block: NDArray[Any], target: FormatInfo, lanes: NDArray[np.uint32]) -> None:
    """Go up to `hi` where lane < floor(p * 2**32). All arithmetic here is exact but the compare.

    From float32 to bfloat16, of the same exponents, the magic number would overflow.
    """
    if target.dtype == BFLOAT16 and block.dtype == FLOAT32:
        _stochastic_bfloat16(block, lanes)
        return
    dtype = block.dtype
    magnitudes = np.abs(block)
    powers = np.empty_like(magnitudes)
    _binade(magnitudes, target, powers)
    ulps = powers * dtype.type(2.0**-target.fraction_bits)
    magic = powers * dtype.type(2.0 ** (_FRACTION_BITS[dtype] - target.fraction_bits))
    low = magnitudes + magic
    low -= magic
    low -= ulps * (low > magnitudes)  # a product: NumPy's where= takes twenty times as long
    share = magnitudes - low
    share *= dtype.type(2.0 ** (32 + target.fraction_bits))
    share /= powers
    low += ulps * (lanes < share.astype(np.uint32))
    np.copysign(low, block, out=block)
    _overflow(block, target)


def _stochastic_bfloat16(block: NDArray[Any], lanes: NDArray[np.uint32]) -> None:
    """As `_stochastic_by_bits`, infinities and NaNs included."""
    bits = block.view(np.uint32)
    nans = np.isnan(block)
    rises = lanes < (bits << np.uint32(16))
    bits += rises.astype(np.uint32) << np.uint32(16)
    bits &= np.uint32(0xFFFF_0000)
    block[nans] = np.nan


def _overflow(block: NDArray[Any], target: FormatInfo) -> None:
    """Values beyond the largest finite number become infinity, or NaN in a format without it."""
    if not block.size or all_within(block, target.largest):
        return
    beyond = np.abs(block) > target.largest
    block[beyond] = np.copysign(block.dtype.type(target.overflow), block[beyond])


class Rounder(Protocol):
    """Rounds C-contiguous blocks of the computing type in place, which holds the target's values.

    If `exact` is true nothing happens. If `stochastic` is true it takes lanes, which broadcast
    against the block; without them it rounds to nearest. It takes a bound of the magnitudes,
    infinity if none is known, and returns a bound of the rounded magnitudes.
    """

    exact: bool
    stochastic: bool

    def __call__(
        self,
        block: NDArray[Any],
        lanes: NDArray[np.uint32] | None,
        workspace: Workspace,
        bound: float = ...,
    ) -> float: ...


def rounder(
    computing: np.dtype[Any],
    target: np.dtype[Any] | FormatInfo,
    stochastic: bool,
    on_lattice: bool = False,
) -> Rounder:
    """The Rounder for a dtype, or for any format; `on_lattice` as for `round_block`."""
    if isinstance(target, FormatInfo):
        return FormatRounder(target, stochastic)
    return DtypeRounder(computing, target, stochastic, on_lattice)


class DtypeRounder:
    """Rounds blocks of the computing type to one target dtype."""

    def __init__(
        self,
        computing: np.dtype[Any],
        target: np.dtype[Any],
        stochastic: bool,
        on_lattice: bool = False,
    ) -> None:
        self._info = SUB_32_BIT.get(target) if computing in _UNSIGNED else None
        self._on_lattice = on_lattice
        self._single = target == FLOAT32 and computing == FLOAT64
        # From float64 the casts of ml_dtypes round twice, by way of float32.
        self.target, self._by_cast = target, computing == FLOAT32 and self._info is not None
        self.exact = self._info is None and not self._single
        self.stochastic = stochastic and self._info is not None
        self.factor: np.generic | None = None  # of _nearest_on_lattice
        if on_lattice and self._info and self._info.has_negative_zero and not stochastic:
            if not (target == BFLOAT16 and computing == FLOAT32):
                self.factor = _factor(computing, self._info)

    def __call__(
        self,
        block: NDArray[Any],
        lanes: NDArray[np.uint32] | None,
        workspace: Workspace,
        bound: float = math.inf,
    ) -> float:
        if self._info is None:
            if self._single:
                block[...] = block.astype(np.float32)
            return bound
        if self._by_cast and lanes is None and block.size < limits.CAST_WIDTH:
            block[...] = block.astype(self.target)
            return math.inf
        target, lattice = self._info, self._on_lattice
        if (lattice or lanes is not None) and block.size and not bound <= target.largest:
            bound = largest_magnitude(block)
        finite = bound <= target.largest
        round_block(block, target, lanes, workspace, finite=finite, on_lattice=lattice)
        return bound * (1.0 + 2.0**-target.fraction_bits)


def _reached(dtype: np.dtype[Any], bound: float, reach: float, rows: int) -> float | None:
    """A bound of the sums of this number of rows, roundings included; None if they may overflow."""
    target = SUB_32_BIT[dtype]
    reached = (bound + rows * reach) * (1.0 + 2.0**-target.fraction_bits) ** rows
    return reached if reached <= target.largest else None


def add_rows(
    rounder: Rounder,
    partial: NDArray[Any],
    rows: Sequence[NDArray[Any]] | NDArray[Any],
    bound: float,
    reach: float,
    workspace: Workspace,
) -> float | None:
    """Add rows one after the other, rounding to nearest in between, without looking at the values.

    `bound` bounds the magnitudes in `partial`, `reach` those in `rows`. Returns a bound of the
    sums; or None, and does nothing, if sums might become infinite, or the format is not one to
    which multiples of its smallest value are rounded.
    """
    if not isinstance(rounder, DtypeRounder) or (factor := rounder.factor) is None:
        return None
    reached = _reached(rounder.target, bound, reach, len(rows))
    if reached is None:
        reached = _reached(rounder.target, largest_magnitude(partial), reach, len(rows))
    if reached is None:
        return None
    shifted = workspace.take(partial.dtype, partial.shape)
    for row in rows:
        np.add(partial, row, out=partial)
        np.multiply(partial, factor, out=shifted)
        np.subtract(shifted, partial, out=partial)  # as in _nearest_on_lattice
        np.subtract(shifted, partial, out=partial)
    workspace.give(shifted)
    return reached


def check_counter(name: str, value: int) -> int:
    """A 64-bit word of the generator's key or counter, as int; ValueError outside its range."""
    if not 0 <= int(value) < 2**64:
        raise ValueError(f"{name}={value!r}: expected an integer from 0 to 2**64 - 1")
    return int(value)


def check_places(place: ArrayLike, batch: tuple[int, ...]) -> tuple[int, NDArray[np.uint64] | None]:
    """The place that all batch entries have in common, or 0 and one for each."""
    if isinstance(place, (int, np.integer)):
        return check_counter("place", int(place)), None
    return 0, check_batch_offset(place, batch)


def round_to(
    x: ArrayLike,
    dtype: DTypeLike | FormatInfo,
    *,
    rounding: str = "nearest",
    seed: int = 0,
    step: int = 1,
    call: int = 0,
    place: ArrayLike = 0,
    batch_ndim: int = 0,
) -> NDArray[Any]:
    """Convert `x` to the floating-point `dtype` in one correct rounding.

    `x` has any floating-point dtype and any shape; the result is a new C-contiguous array of the
    same shape. `rounding` is "nearest" (ties to even) or "stochastic", which decides between the
    two neighbours by the Philox lane of the element's flat index in (seed, step, call, place).
    Rounding to float32 and float64 is always to nearest. A FormatInfo instead of the dtype stands
    for any format; its values are returned in its carrier. The `batch_ndim` leading axes count
    values that are rounded independently, each with its own flat indices. `place` is an integer, or
    integers that broadcast to the shape of these axes.

    **Raises**: TypeError for dtypes that are not floating-point ones; ValueError for a seed or
    counter that is not a 64-bit word.

    >>> import ml_dtypes, numpy as np
    >>> round_to(np.array([1.0, 1.01, 1e40]), ml_dtypes.bfloat16).tolist()
    [1.0, 1.0078125, inf]
    >>> round_to(np.full(6, 1.25), ml_dtypes.float8_e5m2, rounding="stochastic").tolist()
    [1.25, 1.25, 1.25, 1.25, 1.25, 1.25]
    """
    stochastic = check_rounding(rounding)
    values = np.asarray(x)
    common, places = check_places(place, values.shape[:batch_ndim])
    counters = {"seed": seed, "step": step, "call": call}
    words = {name: check_counter(name, value) for name, value in counters.items()}
    target = dtype if isinstance(dtype, FormatInfo) else np.dtype(dtype)
    held = target.carrier if isinstance(target, FormatInfo) else target
    for name, given in (("x", values.dtype), ("dtype", held)):
        check_float(name, given, ", or a Format" if name == "dtype" else "")
    require_subnormals()
    # A grid held in float64 is rounded to in float64; no dtype but float64 itself asks for that.
    computing = computing_dtype(
        values.dtype, held if isinstance(target, FormatInfo) else values.dtype
    )
    round_part = rounder(computing, target, stochastic)
    lanes = Lanes(words["seed"], words["call"])
    out = memory.empty(values.shape, held)
    compiled = kernels.compiled()
    large = values.size >= kernels.least_work()
    if (
        compiled is not None
        and large
        and compiled.round_to(
            values,
            target,
            out,
            stochastic=stochastic,
            counters=(words["seed"], words["step"], words["call"]),
            place=common,
            places=places,
            batch_ndim=batch_ndim,
        )
    ):
        return out
    batch, size = math.prod(values.shape[:batch_ndim]), math.prod(values.shape[batch_ndim:])
    sources, results = values.reshape(batch, size), out.reshape(batch, size)

    def round_box(rows: slice, columns: slice) -> None:
        require_subnormals()
        workspace = own_workspace(limits.BLOCK)
        drawn = None
        if round_part.stochastic and places is not None:
            shape = rows.stop - rows.start, columns.stop - columns.start
            draws = Draws(lanes, (rows, columns), (size,), places.ravel())
            drawn = draws.draw(shape, words["step"])
        elif round_part.stochastic:
            drawn = np.empty(columns.stop - columns.start, np.uint32)
            lanes.fill(drawn, start=columns.start, step=words["step"], batch_offset=common)
        with np.errstate(all="ignore"):
            for part in split((rows, columns), limits.BLOCK):
                block = sources[part].astype(computing, order="C")
                round_part(block, drawn, workspace)
                encode(block, results[part], workspace)

    whole_batch = slice(0, batch)
    boxes = (
        split(whole((batch, size)), limits.BLOCK)
        if places is not None
        else ((whole_batch, *box) for box in split(whole((size,)), limits.BLOCK))
    )
    if values.size:
        threads.share(lambda box: round_box(*box), boxes, values.size)
    return out
