"""round_to on a device: one kernel, the finish of a fold, to the bits of fallback.round_to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from gpusim.fallback.formats import FormatInfo, check_float, computing_dtype, is_sub_32_bit
from gpusim.fallback.rounding import check_counter, check_places, check_rounding

from .device import Array, Device, Kernel, Launch
from .folding import C_NAMES, finish_float, thread_count, write_members, write_out
from .layout import ALIGNMENT, MemberLayout, layout_of, rows_of
from .structs import ROUND, struct, writer
from .targets import NAMES

write_counters = writer(ROUND, *(f"finish.{name}" for name in ("seed", "step", "call")))
write_offset = writer(ROUND, "finish.batch_offset", "finish.batch_offsets")


@dataclass(frozen=True, eq=False)
class RoundLaunch:
    """The launch of a rounding to `dtype`, without addresses and counters; see `FoldLaunch`."""

    dtype: np.dtype[Any]
    kernel: Kernel | None = None
    arguments: bytes = b""
    threads: int = 0
    copies: bool = False


def round_to(
    device: Device,
    x: Any,
    dtype: DTypeLike | FormatInfo,
    *,
    rounding: str = "nearest",
    seed: int = 0,
    step: int = 1,
    call: int = 0,
    place: ArrayLike = 0,
    batch_ndim: int = 0,
) -> Array:
    """`fallback.round_to` for arrays of `device`: the same arguments, errors and bits."""
    stochastic = check_rounding(rounding)
    counters = {"seed": seed, "step": step, "call": call}
    words = [check_counter(name, value) for name, value in counters.items()]
    offset, offsets = check_places(place, x.shape[:batch_ndim])
    target = dtype if isinstance(dtype, FormatInfo) else np.dtype(dtype)
    launch = plan_launch(target, stochastic, _layout(x, device), batch_ndim)
    out = device.empty(x.shape, launch.dtype)
    if launch.copies:
        x = device.contiguous(x)
        launch = plan_launch(target, stochastic, _layout(x, device), batch_ndim)
    if launch.kernel is not None:
        buffer = bytearray(launch.arguments)
        write_members(buffer, device.pointer(x), 0)
        write_out(buffer, device.pointer(out))
        write_counters(buffer, *words)
        listed = None  # alive until the launch is queued
        if stochastic and offsets is not None:
            listed = device.constant(offsets.tobytes())
        write_offset(buffer, offset, 0 if listed is None else device.pointer(listed))
        device.run(Launch(launch.kernel, np.frombuffer(buffer, ROUND), launch.threads))
    return out


def _layout(x: Array, device: Device) -> MemberLayout:
    offset = device.pointer(x) % ALIGNMENT
    return MemberLayout(1, x.shape, x.strides, x.dtype, 0, offset, 16)


@lru_cache(maxsize=1024)
def plan_launch(
    target: np.dtype[Any] | FormatInfo, stochastic: bool, members: MemberLayout, batch_ndim: int
) -> RoundLaunch:
    held = target.carrier if isinstance(target, FormatInfo) else target
    source = members.dtype
    for name, given in (("x", source), ("dtype", held)):
        check_float(name, given, ", or a Format" if name == "dtype" else "")
    if not math.prod(members.shape):
        return RoundLaunch(held)
    # A format whose carrier is float64 is rounded to in float64; of dtypes only float64 itself is.
    computing = computing_dtype(source, held if isinstance(target, FormatInfo) else source)
    drawn = stochastic and is_sub_32_bit(target)
    rows = rows_of(members, batch_ndim if drawn else 0, source.itemsize, 1)
    if rows.too_many_axes:
        return RoundLaunch(held, copies=True)
    kernel, chunk = template(source, computing)
    arguments = struct(ROUND)
    arguments["layout"] = layout_of(
        members, rows, chunk=chunk, itemsize=source.itemsize, fixed=drawn
    )
    finish_float(arguments["finish"], computing, target, rounds=target != source, drawn=drawn)
    threads = thread_count(arguments["layout"])
    return RoundLaunch(held, kernel, arguments.tobytes(), threads)


def template(source: np.dtype[Any], computing: np.dtype[Any]) -> tuple[Kernel, int]:
    """The kernel for a source, and its chunk's elements: two 16-byte loads of the wider dtypes."""
    chunk = min(16, 32 // source.itemsize)
    name = f"round_to<{NAMES[source]}, {C_NAMES[computing]}, {chunk}>"
    return Kernel("round.cu", name), chunk
