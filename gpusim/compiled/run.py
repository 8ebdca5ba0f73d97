"""Run a compiled kernel over all tiles, in parts that threads share."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from gpusim.fallback import limits, threads
from gpusim.fallback.subnormals import require_subnormals

from ..cuda.cache import once
from ..cuda.device import Kernel
from ..cuda.structs import OF_SOURCE
from . import build
from .build import ADDRESS, INTEGER

# A part is run without a look at signals: it has at most so many steps of elements, about 50 ms.
PART = 1 << 26

LINE = 64  # bytes of a cache line, at which what a part needs for itself begins

Function = Callable[..., None]


@once
def function(kernel: Kernel) -> Function | None:
    """The instance that does what a kernel of a GPU does; None if it cannot be compiled.

    Of a fold's template arguments, order, operator and chunks are left to the arguments.
    """
    parameters = kernel.name.partition("<")[2].rstrip(">").split(", ")
    struct, name, count = {
        "fold.cu": ("Fold", "fold_tiles", 4),
        "round.cu": ("Round", "round_tiles", 2),
    }[kernel.source]
    size = OF_SOURCE[kernel.source].itemsize
    return instance(struct, f"{name}<{', '.join(parameters[:count])}>", size)


@once
def instance(struct: str, name: str, size: int, header: str = "tiles.h") -> Function | None:
    """An instance of a template of a header, and the bytes of the struct that it takes."""
    unit = f'#include "{header}"\nKERNEL({struct}, {name})\n'
    found = build.functions(unit, size, run=(ADDRESS, INTEGER, INTEGER, ADDRESS))
    function: Function | None = None if found is None else found.run
    return function


def run(
    kernel: Function,
    arguments: bytearray,
    tiles: int,
    steps: int,
    scratch: int = 0,
    *,
    fast: bool = False,
) -> None:
    """Run a kernel on its struct.

    **Arguments**:

    - `tiles`: the number of tiles at most; `steps`: of elements that are folded.
    - `scratch`: bytes that each part needs for itself.
    - `fast`: whether it draws no random numbers.
    """
    given = (ctypes.c_char * len(arguments)).from_buffer(arguments)
    count = threads.count()
    work = steps // limits.COMPILED_ELEMENTS if fast else steps
    shared = count > 1 and work >= limits.SHARED_WORK
    parts = max(1, min(tiles, max(4 * count if shared else 1, steps // PART)))

    def run_part(part: int) -> None:
        require_subnormals()
        own = np.empty(scratch + LINE, np.uint8) if scratch else None
        kernel(given, part, parts, None if own is None else -(-own.ctypes.data // LINE) * LINE)

    threads.share(run_part, range(parts), work)
