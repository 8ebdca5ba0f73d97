"""round_to and quantise_fpx: values rounded to another format, specified to the bit.

Each is one correct rounding, to nearest or stochastic, with the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpusim.fallback.formats import FormatInfo, is_sub_32_bit
from gpusim.fallback.wires import WireInfo, round_to_wire

from .collectives.kernels import empty, kernels
from .formats import Format, FormatLike, kernel_format, rounding_name
from .libraries import on_device, to_host
from .maps.axis_environment import Axes, axis_environment, global_indices, union
from .maps.mapped_array.align import lead, lead_full, sizes
from .maps.mapped_array.array import Array, MappedArray, unpack, wrap, wrap_array
from .maps.names import AxisName, resolve_names
from .wires import Wire

__all__ = ["quantise_fpx", "round_to"]


def round_to(
    x: Any,
    dtype: DTypeLike | FormatLike | Wire,
    *,
    rounding: str = "nearest",
    seed: Any = 0,
    axis_name: AxisName = None,
) -> Any:
    """Convert to a floating-point dtype or format in one correct rounding.

    NumPy's own conversions round float64 twice on its way to bfloat16 and the 8-bit formats, and
    know no stochastic rounding.

    **Arguments**:

    - `x`: an array or number of any floating-point dtype and shape; inside vmap also a
      MappedArray.
    - `dtype`: float64, float32, float16, bfloat16, one of float8_e5m2, float8_e4m3fn,
      float8_e5m2fnuz and float8_e4m3fnuz, or a short name (bf16, fp16, fp32, fp64, fp8, fp4); or a
      `Format`, or a FormatInfo of gfloat. Or a `Wire`: the whole value is a message, which arrives
      in the dtype of `x`.
    - `rounding`: ``"nearest"``, ties to even, or ``"stochastic"``, which takes the upper neighbour
      with the probability that makes the mean exact. Stochastic rounding applies to formats of
      fewer bits than float32. A Wire has its own.
    - `seed`: of stochastic rounding, 0 to 2**64 - 1; inside vmap it may be mapped. An element's
      random bits are a function of the seed, of its index in `x`, flattened, and of the replica:
      each one has bits of its own, the same under every map. Use another seed for each call that
      should draw its own.
    - `axis_name`: inside a map, the axes along which replicas have bits of their own; a name or a
      tuple of names. None means all axes of the enclosing maps, named or not; () none: each replica
      rounds as outside of a map, so that equal values stay equal.

    **Returns**: A new array of the shape of `x` (0-d for a number), in `dtype`. Values of a Format
    are in float32 if that holds all of them, else in float64. Under vmap, what is rounded
    stochastically is mapped over the axes of `axis_name`, whatever `x` is.

    **Raises**:

    - TypeError: for dtypes that are not floating-point ones, and a seed that is not an integer.
    - ValueError: for another rounding, or a seed out of range.
    - NameError: for an axis name that is not bound.

    What a wire loses can be sent with the next value (error feedback):

    >>> import gpusim, numpy as np
    >>> wire, residual = gpusim.Wire("int4", scale="amax"), np.zeros(2)
    >>> for gradient in np.array([[7.0, 0.4], [7.0, 0.4], [7.0, 0.4]]):
    ...     sent = gpusim.round_to(gradient + residual, wire)
    ...     residual += gradient - sent
    ...     print(sent, residual)
    [7. 0.] [0.  0.4]
    [7. 1.] [ 0.  -0.2]
    [7. 0.] [0.  0.2]

    >>> import gpusim, ml_dtypes, numpy as np
    >>> x = 1 + 2.0**-8 + 2.0**-40
    >>> gpusim.round_to(x, ml_dtypes.bfloat16), np.float64(x).astype(ml_dtypes.bfloat16)
    (array(1.00781, dtype=bfloat16), 1)
    >>> y = gpusim.round_to(np.full(1000, 0.3), np.float16, rounding="stochastic", seed=1)
    >>> np.unique(y)
    array([0.2998, 0.3  ], dtype=float16)
    >>> float(abs(y.mean(dtype=float) - 0.3)) < 1e-5
    True
    >>> weights = np.full(4, 0.3)  # in each replica
    >>> half = lambda w: gpusim.round_to(w, np.float16, rounding="stochastic")
    >>> gpusim.vmap(half, in_axes=None, axis_size=2)(weights)
    array([[0.2998, 0.3   , 0.3   , 0.3   ],
           [0.3   , 0.3   , 0.3   , 0.3   ]], dtype=float16)
    >>> gpusim.round_to(np.array([1.0, 1.3]), gpusim.Format(exponent_bits=3, mantissa_bits=1))
    array([1. , 1.5], dtype=float32)
    """
    if dtype is None:  # NumPy's default would be float64
        raise TypeError("dtype=None: expected a floating-point dtype or a Format")
    rounding = rounding_name(rounding)
    if isinstance(dtype, Wire):
        if rounding not in ("nearest", dtype.rounding):
            raise ValueError(f"rounding={rounding!r}: expected the rounding of {dtype}")
        return round_each(x, dtype.info, dtype.rounding, seed, axis_name)
    return round_each(x, kernel_format(dtype), rounding, seed, axis_name)


def quantise_fpx(
    x: Any,
    exponent_bits: int,
    mantissa_bits: int,
    rounding: str = "stochastic",
    *,
    seed: Any = 0,
    axis_name: AxisName = None,
) -> Any:
    """Quantise to a small format without changing the dtype, as poptorch-experimental-addons does.

    The format has a sign bit, `exponent_bits` and `mantissa_bits`; all of its codes are finite
    numbers, its exponents go up to M = 2**(exponent_bits - 1) - 1, and its smallest normal number
    is 2**-M, with subnormal numbers below. Values beyond the largest, infinities too, become the
    largest; NaN stays. As in the original, "nearest" takes ties towards zero, and values are first
    rounded to float32, whose subnormals are scaled to those of the format.

    **Arguments**:

    - `x`: an array or number of any floating-point dtype and shape; inside vmap also a
      MappedArray.
    - `exponent_bits`: 1 to 8.
    - `mantissa_bits`: 0 to 23.
    - `rounding`: ``"nearest"`` or ``"stochastic"``, which has `round_to`'s random bits.
    - `seed`, `axis_name`: of stochastic rounding, as in `round_to`.

    **Returns**: A new array of the shape and dtype of `x`.

    **Raises**:

    - ValueError: for widths or a rounding outside these, or a seed out of range.
    - TypeError: for a dtype of `x` that is not a floating-point one, and a seed that is not an
      integer.
    - NameError: for an axis name that is not bound.

    >>> import gpusim, numpy as np
    >>> gpusim.quantise_fpx(np.array([0.2, 1.3, -7.0]), 2, 1, rounding="nearest")
    array([ 0.25,  1.5 , -3.  ])
    """
    rounding = rounding_name(rounding)
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(
            "Expected quantise(rounding=?) to be 'nearest' or 'stochastic', "
            f"actual {str(rounding)!r}"
        )
    _check_bits("exponent", exponent_bits, 1, 8)
    _check_bits("mantissa", mantissa_bits, 0, 23)
    data, _ = _stacked(x)
    top = 2 ** (exponent_bits - 1) - 1
    target = Format(
        exponent_bits, mantissa_bits, bias=top + 1, has_infinities=False, high_nans=0
    ).info
    round_to = kernels(data).round_to
    # In float64, in which CuPy's functions keep float32's subnormal numbers.
    wide = round_to(round_to(data, np.float32), np.float64)
    wide = np.clip(wide, -target.largest, target.largest)
    # As in the original, values below 2**-top are subnormal numbers of 23 bits.
    scaled = Format(8, 23, bias=127 + min(0, top - 126)).info
    wide = round_to(round_to(wide, scaled), np.float64)
    if rounding == "nearest":  # just below a tie the nearest value is the lower one
        wide = np.nextafter(wide, np.copysign(0.0, wide))
    quantised = round_each(_like(x, wide), target, rounding, seed, axis_name)
    return _like(quantised, round_to(unpack(quantised)[0], data.dtype))


def _check_bits(field: str, given: int, least: int, most: int) -> None:
    if given > most:
        raise ValueError(
            f"quantise_fpx({field}_bits={given}) not supported, "
            f"maximum number of {field} bits is {most}"
        )
    if given < least:
        raise ValueError(
            f"quantise_fpx({field}_bits={given}) not supported, "
            f"minimum number of {field} bits is {least}"
        )


def _stacked(x: Any) -> tuple[Array, Axes]:
    """`x` as an array of any library, and its leading mapped axes."""
    data, axes = unpack(x)
    return (data if hasattr(data, "__array_function__") else np.asarray(data)), axes


def round_each(
    x: Any,
    target: DTypeLike | FormatInfo | WireInfo,
    rounding: str,
    seed: Any,
    axis_name: AxisName,
) -> Any:
    """`round_to` to a format of the kernels."""
    data, axes = _stacked(x)
    target = target if isinstance(target, (FormatInfo, WireInfo)) else np.dtype(target)
    seeds, seed_axes = _seeds(seed)
    entries = axis_environment() if axis_name is None else resolve_names(axis_name)
    round_to: Callable[..., Array] = kernels(data).round_to
    if isinstance(target, WireInfo) and not on_device(data):
        round_to = round_to_wire
    narrow = is_sub_32_bit(target.format if isinstance(target, WireInfo) else target)
    if rounding != "stochastic" or not narrow:
        first = int(seeds.flat[0]) if seeds.size else 0
        return _like(x, round_to(data, target, rounding=rounding, seed=first, batch_ndim=len(axes)))
    places, own = global_indices(entries)
    mapped = union(union(axes, own), seed_axes)
    shape = sizes(mapped)
    if mapped != axes:
        data = lead_full(wrap(data, axes), mapped)
    places = np.broadcast_to(lead(wrap(places.reshape(sizes(own)), own), mapped), shape)
    if not seed_axes:
        rounded = round_to(
            data,
            target,
            rounding=rounding,
            seed=int(seeds),
            place=places if shape else int(places),
            batch_ndim=len(shape),
        )
    else:
        seeds = np.broadcast_to(lead(wrap(seeds, seed_axes), mapped), shape)
        rounded = None
        for index in np.ndindex(*shape):
            own_seed, place = int(seeds[index]), int(places[index])
            row = round_to(
                data[(*index, ...)], target, rounding=rounding, seed=own_seed, place=place
            )
            if rounded is None:
                rounded = empty(data, data.shape, row.dtype)
            rounded[(*index, ...)] = row
    return wrap_array(rounded, mapped) if mapped or isinstance(x, MappedArray) else rounded


def _seeds(seed: Any) -> tuple[NDArray[Any], Axes]:
    """Checked seeds of the replicas, on the host, and the axes along which they differ."""
    data, axes = unpack(seed)
    values = np.asarray(to_host(data) if on_device(data) else data)
    if values.ndim != len(axes) or (values.dtype.kind not in "iu" and not isinstance(seed, int)):
        raise TypeError(f"seed={seed!r:.80}: expected an integer, one for each replica")
    if values.size and not (0 <= int(values.min()) and int(values.max()) < 2**64):
        raise ValueError(f"seed={seed!r:.80}: expected an integer from 0 to 2**64 - 1")
    return values, axes


def _like(x: Any, data: Array) -> Any:
    """Stacked data as a MappedArray if `x` is one, else as a plain array."""
    return wrap_array(data, unpack(x)[1]) if isinstance(x, MappedArray) else data
