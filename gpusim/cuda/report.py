"""python -m gpusim.cuda.report: compile kernels for every architecture, and print for each its
registers, stack, spills, warps on a multiprocessor, and loads in flight.

All kernels take minutes; the tests compile a part. Loads in flight need nvdisasm (pip install
nvidia-cuda-nvdisasm). They are groups of the widest loads that are issued before one of them is
used: the number of loads x their bytes, with a star in a loop. `8x16*` in a kernel of 24 warps is
24 x 32 x 8 x 16 bytes in flight on a multiprocessor. Kernels that copy asynchronously have as much
in flight as their stages in shared memory hold."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import sass
from .compile import ARCHITECTURES, compiler, mangled, resources
from .device import Kernel
from .folding import STAGE_BATCH, STAGE_THREADS
from .templates import main_folds, main_sends, units

_WARPS = {"sm_75": 32, "sm_80": 64, "sm_90": 64, "sm_100": 64}  # that a multiprocessor holds
_BLOCKS = {"sm_75": 16}  # and blocks; others 32


def warps(kernel: Kernel, registers: int, architecture: str) -> int:
    """Warps on a multiprocessor whose 65,536 registers are full, in whole blocks.

    >>> warps(Kernel("logical.cu", "logical<4, 1>"), 80, "sm_90")
    24
    """
    staged = kernel.name.endswith(f", {STAGE_BATCH}>")
    block = (STAGE_THREADS if staged else 256) // 32
    blocks = 65536 // (-(-registers // 8) * 8 * 32 * block)
    return min(blocks, _BLOCKS.get(architecture, 32), _WARPS[architecture] // block) * block


def loads(text: str) -> str:
    """The groups of the widest loads of a listing, or its asynchronous copies."""
    batches = sass.batches(text)
    widest = max((batch.bytes for batch in batches), default=0)
    groups = [f"{b.loads}x{b.bytes}{'*' * b.loops}" for b in batches if b.bytes == widest]
    copies = sass.copies(text)
    return f"{copies} copies ahead" if copies else " ".join(groups)


def report(architecture: str, kernels: Sequence[Kernel]) -> list[str]:
    """A line for each kernel; loads where nvdisasm is."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "unit.cubin"
        needs = resources(kernels, architecture, cubin)
        listings = sass.listing(cubin) if sass.disassembler() else {}
    lines = []
    for kernel, need in needs.items():
        found = loads(listings[mangled(kernel)]) if listings else ""
        lines.append(
            f"{architecture:7} {need.registers:4} {need.stack:5} {need.spill_stores:6} "
            f"{need.spill_loads:6} {warps(kernel, need.registers, architecture):5}  "
            f"{kernel.name}  {found}".rstrip()
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpusim.cuda.report", description=__doc__)
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, help="only this one")
    parser.add_argument("--unit", action="append", choices=list(units()), help="only this one")
    parser.add_argument("--main", action="store_true", help="only sums with targets of speed")
    given = parser.parse_args(arguments)
    if compiler() is None:
        parser.error("needs nvcc, or CuPy and NVRTC: pip install 'cupy-cuda13x[ctk]'")
    chosen = {"main": main_folds(), **main_sends()} if given.main else units()
    print("arch    regs stack stores  loads warps  kernel")
    for unit, kernels in chosen.items():
        if given.unit and not given.main and unit not in given.unit:
            continue
        for architecture in given.arch or ARCHITECTURES:
            print("\n".join(report(architecture, kernels)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
