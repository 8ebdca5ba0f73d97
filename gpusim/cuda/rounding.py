"""round_to on a device: one kernel, the finish of a fold, to the bits of fallback.round_to."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fallback.formats import FormatInfo, computing_dtype, is_sub_32_bit, kind_of
from fallback.rounding import check_counter, check_rounding

from .device import Array, Device, Kernel, Launch
from .folding import C_NAMES, finish_float
from .layout import Members, laid_out, layout_of
from .structs import ROUND, struct
from .targets import NAMES


def round_to(
    device: Device,
    x: Any,
    dtype: DTypeLike | FormatInfo,
    *,
    rounding: str = "nearest",
    seed: int = 0,
    step: int = 1,
    call: int = 0,
    place: int = 0,
    batch_ndim: int = 0,
) -> Array:
    """`fallback.round_to` for arrays of `device`: the same arguments, errors and bits."""
    stochastic = check_rounding(rounding)
    counters = {"seed": seed, "step": step, "call": call, "place": place}
    words = {name: check_counter(name, value) for name, value in counters.items()}
    target = dtype if isinstance(dtype, FormatInfo) else np.dtype(dtype)
    held = target.carrier if isinstance(target, FormatInfo) else target
    for name, given in (("x", x.dtype), ("dtype", held)):
        if kind_of(given) != "float":
            raise TypeError(f"{name}: {given} given, expected a floating-point dtype")
    out = device.empty(x.shape, held)
    if not math.prod(x.shape):
        return out
    # A format whose carrier is float64 is rounded to in float64; of dtypes only float64 itself is.
    computing = computing_dtype(x.dtype, held if isinstance(target, FormatInfo) else x.dtype)
    drawn = stochastic and is_sub_32_bit(target)
    counted = batch_ndim if drawn else 0
    only, rows = laid_out(device, Members.of([x], device), counted, x.dtype.itemsize, 1)
    kernel, chunk = template(x.dtype, computing)
    arguments = struct(ROUND)
    arguments["layout"] = layout_of(
        only, rows, device.pointer(out), chunk=chunk, itemsize=x.dtype.itemsize, fixed=drawn
    )
    arguments["finish"]["batch_offset"] = words.pop("place")
    for name, word in words.items():
        arguments["finish"][name] = word
    finish_float(arguments["finish"], computing, target, rounds=target != x.dtype, drawn=drawn)
    threads = int(arguments["layout"]["rows"] * arguments["layout"]["chunks"])
    device.run(Launch(kernel, arguments, threads))
    return out


def template(source: np.dtype[Any], computing: np.dtype[Any]) -> tuple[Kernel, int]:
    """The kernel for a source, and its chunk's elements: two 16-byte loads of the wider dtypes."""
    chunk = min(16, 32 // source.itemsize)
    name = f"round_to<{NAMES[source]}, {C_NAMES[computing]}, {chunk}>"
    return Kernel("round.cu", name), chunk
