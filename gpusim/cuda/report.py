"""python -m gpusim.cuda.report: compile every kernel for every architecture, print its resources.
Takes minutes; the tests compile a part of it."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .compile import ARCHITECTURES, compiler, mangled, resources
from .device import Kernel
from .templates import units

_FUNCTION = re.compile(r"Function : (\w+)(.*?)(?=Function :|\Z)", re.DOTALL)
_ACCESS = re.compile(r"\b((?:LDG|STG|LDL|STL|LD|ST)\.[\w.]+)")


def accesses(cubin: Path) -> dict[str, Counter[str]]:
    """How often each function's machine code has each width of global and local access."""
    command = ["cuobjdump", "--dump-sass", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        name: Counter(_width(access) for access in _ACCESS.findall(body))
        for name, body in _FUNCTION.findall(text)
    }


def _width(access: str) -> str:
    """ "LDG.E.128.CONSTANT" as "LDG.128": what it is, and the bits it moves."""
    parts = access.split(".")
    bits = next((part for part in parts if part in ("U8", "S8", "U16", "S16", "64", "128")), "32")
    return f"{parts[0]}.{bits.lstrip('US')}"


def report(architecture: str, kernels: Sequence[Kernel]) -> list[str]:
    """A line for each kernel: registers, stack and spills, and accesses where cuobjdump is."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "unit.cubin"
        needs = resources(kernels, architecture, cubin)
        found = accesses(cubin) if shutil.which("cuobjdump") else {}
    lines = []
    for kernel, need in needs.items():
        widths = " ".join(f"{k}x{n}" for k, n in sorted(found.get(mangled(kernel), {}).items()))
        lines.append(
            f"{architecture:7} {need.registers:4} {need.stack:5} {need.spill_stores:6} "
            f"{need.spill_loads:6}  {kernel.name}  {widths}".rstrip()
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpusim.cuda.report", description=__doc__)
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, help="only this one")
    parser.add_argument("--unit", action="append", choices=list(units()), help="only this one")
    given = parser.parse_args(arguments)
    if compiler() is None:
        parser.error("needs nvcc, or CuPy and NVRTC: pip install 'cupy-cuda13x[ctk]'")
    print("arch    regs stack stores  loads  kernel")
    for unit, kernels in units().items():
        if given.unit and unit not in given.unit:
            continue
        for architecture in given.arch or ARCHITECTURES:
            print("\n".join(report(architecture, kernels)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
