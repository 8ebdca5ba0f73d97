"""make gpu-kernels ARCH=sm_90: compile every kernel of gpusim for a GPU that is elsewhere.

NVRTC does it, without a GPU. The machine code is kept in $GPUSIM_CACHE_DIR, .gpu/cache, and packed
into .gpu/last for a borrowed machine, which compiles none of it again if its NVRTC has the same
version. What an interrupted run has compiled stays.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time
from collections.abc import Sequence

from bench import machine
from gpusim.cuda import cache, templates
from gpusim.cuda.compile import file_name, machine_code
from gpusim.cuda.device import Kernel
from gpusim.cuda.launch import require_cupy
from tests.gpu import borrowed


def compile_one(given: tuple[Kernel, str]) -> str | None:
    """Compile a kernel into the cache. Returns the compiler's words if it fails."""
    try:
        machine_code(*given)
    except RuntimeError as error:
        return f"{given[0].name}: {error}"
    return None


def bar(done: int, total: int, seconds: float, began: int = 0) -> str:
    """
    >>> bar(30, 60, 75.0, began=20)
    '[###############               ] 30 of 60, about 3:45 left'
    """
    left = int(seconds * (total - done) / max(1, done - began))
    filled = 30 * done // max(1, total)
    clock = f"{left // 60}:{left % 60:02}"
    return f"[{'#' * filled:30}] {done} of {total}, about {clock} left"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make gpu-kernels", description=__doc__)
    add = parser.add_argument
    add("architecture", help="sm_90 for H100 and H200")
    add("--only", default="", metavar="TEXT", help="kernels whose names contain this")
    given = parser.parse_args(arguments)
    if not re.fullmatch(r"sm_\d+", given.architecture):
        parser.error(f"expected an architecture such as sm_90, got {given.architecture!r}")
    try:
        version = ".".join(map(str, require_cupy().cuda.nvrtc.getVersion()))
    except (ImportError, RuntimeError) as error:
        parser.error(f"needs CuPy with NVRTC: {error}")
    folder = cache.folder()
    if folder is None:
        parser.error(f"{cache.ENVIRONMENT} names no folder")
    work = folder.parents[1]  # of cache/gpusim
    if not folder.exists():
        borrowed.unpack(work / "last" / borrowed.KERNELS, work)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    units = templates.units().values()
    every = dict.fromkeys([*templates.main_folds(), *(kernel for unit in units for kernel in unit)])
    kernels = [kernel for kernel in every if given.only in kernel.name]
    left = [k for k in kernels if not (folder / file_name(k, given.architecture)).exists()]
    began = len(kernels) - len(left)
    print(f"NVRTC {version}, {given.architecture}: {len(kernels)} kernels, {began} are there")
    failed, start = [], time.monotonic()
    try:
        # Not threads: NVRTC compiles in one of them at a time. Not forks: CuPy may be in use.
        with multiprocessing.get_context("spawn").Pool(machine.cores()) as pool:
            pairs = [(kernel, given.architecture) for kernel in left]
            for number, wrong in enumerate(pool.imap_unordered(compile_one, pairs), began + 1):
                failed += [wrong] if wrong else []
                text = bar(number, len(kernels), time.monotonic() - start, began)
                if sys.stdout.isatty():
                    print(f"\r\033[K{text}", end="", flush=True)
                elif number % 50 == 0:
                    print(text, flush=True)
    finally:  # what an interrupted run has compiled is of use, too
        (work / "last").mkdir(exist_ok=True)
        borrowed.pack(work, work / "last")
    size = (work / "last" / borrowed.KERNELS).stat().st_size / 2**20
    print(*failed, f"packed into last/{borrowed.KERNELS}, {size:.1f} MiB", sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
