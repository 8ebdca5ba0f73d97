"""Compile the kernels: with NVRTC for a launch, and ahead of time to read resources from ptxas.
This needs neither a driver nor a GPU; ahead of time nvcc serves too."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..optional import load
from .cache import cached, once
from .device import Kernel

SOURCES = Path(__file__).parent
ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")

# Every operation is rounded on its own, and subnormal numbers are kept.
OPTIONS = ("-std=c++17", "--fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
# From this version NVRTC keeps results by way of the driver. On an H200, kernels compiled with
# `-ftz=true`, which had been compiled with `-ftz=false` before, kept subnormal numbers.
NO_CACHE, HAS_CACHE = "--no-cache", (12, 9)

ARGUMENTS = {
    "fold.cu": "Fold",
    "exact.cu": "Exact",
    "compensated.cu": "Compensated",
    "logical.cu": "Logical",
    "round.cu": "Round",
    "chain.cu": "Sent",
    "machine.cu": "Sent",
    "fixed.cu": "Fixed",
    "ragged.cu": "Ragged",
    "scatter.cu": "Scatter",
}


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel, by ptxas: registers and bytes of local memory per thread."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


def compiler() -> str | None:
    """The compiler to use ahead of time: "nvrtc" (through CuPy), as for a launch; else "nvcc",
    which allots other registers; else None."""
    with suppress(ImportError, RuntimeError):  # CuPy is not installed, or does not find NVRTC
        load("NVRTC needs", "cupy").cuda.nvrtc.getVersion()
        return "nvrtc"
    return "nvcc" if shutil.which("nvcc") else None


@once
def machine_code(kernel: Kernel, architecture: str) -> bytes:
    """The cubin of one instance, by NVRTC, which other processes find on disk."""
    unit = translation_unit([kernel])
    return cached(file_name(kernel, architecture), lambda: with_nvrtc(unit, architecture)[0])


def file_name(kernel: Kernel, architecture: str) -> str:
    """The name of an instance's machine code in the cache, the same on all machines."""
    version = load("arrays on a GPU need", "cupy").cuda.nvrtc.getVersion()
    key = repr((translation_unit([kernel]), _sources_digest(), OPTIONS, architecture, version))
    return f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"


@cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def translation_unit(kernels: Iterable[Kernel]) -> str:
    """A source that holds these instances of one file's templates."""
    kernels = list(kernels)
    (source,) = {kernel.source for kernel in kernels}
    lines = [f'#include "{source}"']
    for kernel in kernels:
        if "<" in kernel.name:
            lines.append(f"template __global__ void {kernel.name}(const {ARGUMENTS[source]});")
    return "\n".join(lines) + "\n"


def resources(
    kernels: Iterable[Kernel], architecture: str, cubin: Path | None = None
) -> dict[Kernel, Resources]:
    """Compile the instances for one architecture, such as "sm_90".

    The machine code is written to `cubin`. RuntimeError with the compiler's messages if it fails;
    FileNotFoundError without a compiler.
    """
    kernels = list(kernels)
    text = translation_unit(kernels)
    match compiler():
        case "nvrtc":
            made, log = with_nvrtc(text, architecture, "--ptxas-options=-v")
        case "nvcc":
            made, log = _with_nvcc(text, architecture)
        case _:
            raise FileNotFoundError("neither nvcc nor CuPy with NVRTC is installed")
    if cubin is not None:
        cubin.write_bytes(made)
    found = dict(_parse(log))
    return {kernel: found[mangled(kernel)] for kernel in kernels}


def _with_nvcc(text: str, architecture: str) -> tuple[bytes, str]:
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "unit.cu", Path(folder) / "unit.cubin"
        source.write_text(text)
        command = ["nvcc", "-cubin", f"-arch={architecture}", *OPTIONS, "-Xptxas=-v"]
        command += [f"-I{SOURCES}", str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"nvcc -arch={architecture}:\n{done.stderr}")
        return made.read_bytes(), done.stderr


def with_nvrtc(text: str, architecture: str, *more: str) -> tuple[bytes, str]:
    """Compile a source: the cubin, and the compiler's messages. `more` are further options.

    It goes through CuPy's bindings of NVRTC. `cupy.RawModule` appends `-ftz=true` to the options,
    and NVRTC obeys the last one.

    **Raises**: RuntimeError with the messages if it fails; ImportError without CuPy.
    """
    nvrtc: Any = load("arrays on a GPU need", "cupy").cuda.nvrtc
    program = nvrtc.createProgram(text, "unit.cu", (), ())
    given = (*OPTIONS, f"-I{SOURCES}", f"-arch={architecture}", *more)
    try:
        nvrtc.compileProgram(
            program, (*given, NO_CACHE) if nvrtc.getVersion() >= HAS_CACHE else given
        )
        # CuPy drops the last byte. A cubin is an ELF file whose last field is the alignment of a
        # segment, a little-endian number of 8 bytes: its last byte is 0.
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise RuntimeError(f"NVRTC for {architecture}: {error}\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)


_ENTRY = re.compile(
    r"Compiling entry function '(\w+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers",
    re.DOTALL,
)


def _parse(log: str) -> Iterable[tuple[str, Resources]]:
    for name, stack, stores, loads, registers in _ENTRY.findall(log):
        yield name, Resources(int(registers), int(stack), int(stores), int(loads))


# Itanium ABI: the codes of builtin types, and the values of the kernels' enumerations.
_BUILTIN = {"float": "f", "double": "d", "u8": "h", "u16": "t", "u32": "j", "u64": "y"}
_VALUES = {
    "false": "Lb0E",
    "true": "Lb1E",
    "SEQUENCE": "Li0E",
    "TREE": "Li1E",
    "EXACT": "Li0E",
    "FLOAT16": "Li1E",
    "BFLOAT16": "Li2E",
    "TARGET": "Li3E",
}


def mangled(kernel: Kernel) -> str:
    """The name that compilers give an instance.

    >>> mangled(Kernel("logical.cu", "logical<8, 2>"))
    '_Z7logicalILi8ELi2EEv7Logical'
    """
    name, _, rest = kernel.name.partition("<")
    struct = ARGUMENTS[kernel.source]
    tail = f"{len(struct)}{struct}"
    if not rest:
        return f"_Z{len(name)}{name}{tail}"
    arguments = "".join(_argument(part) for part in rest.rstrip(">").split(", "))
    return f"_Z{len(name)}{name}I{arguments}Ev{tail}"


def _argument(text: str) -> str:
    if text.isdigit():
        return f"Li{text}E"
    return _BUILTIN.get(text) or _VALUES.get(text) or f"{len(text)}{text}"
