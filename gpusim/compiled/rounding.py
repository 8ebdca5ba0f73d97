"""round_to by the compiled kernels: a fold's finish, over the tiles of one array."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.fallback.formats import FormatInfo

from ..cuda.layout import MemberLayout
from ..cuda.rounding import plan_launch, write_counters, write_members, write_offset, write_out
from ..cuda.targets import NAMES
from .build import TILE
from .run import function, run


def round_to(
    x: NDArray[Any],
    target: np.dtype[Any] | FormatInfo,
    out: NDArray[Any],
    *,
    stochastic: bool,
    counters: tuple[int, int, int],
    place: int,
    places: NDArray[np.uint64] | None,
    batch_ndim: int,
) -> bool:
    """Round `x` into `out`, by the numbers (seed, step, call). False: the case is left to NumPy."""
    if x.dtype not in NAMES or (not isinstance(target, FormatInfo) and target not in NAMES):
        return False
    members = MemberLayout(1, x.shape, x.strides, x.dtype, 0, 0, 1)
    launch = plan_launch(target, stochastic, members, batch_ndim)
    kernel = None if launch.kernel is None else function(launch.kernel)
    if kernel is None:
        return False
    arguments = bytearray(launch.arguments)
    write_members(arguments, x.ctypes.data, 0)
    write_out(arguments, out.ctypes.data)
    write_counters(arguments, *counters)
    listed = None if places is None else np.ascontiguousarray(places)
    write_offset(arguments, place, 0 if listed is None else listed.ctypes.data)
    run(kernel, arguments, -(-x.size // TILE), x.size)
    return True
