"""Compile the kernels ahead of time, with nvcc or NVRTC, and read the resources from ptxas.
This needs neither a driver nor a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .device import Kernel

SOURCES = Path(__file__).parent
ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")

# Every operation is rounded on its own, and subnormal numbers are kept.
_NUMERICS = ("--fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
NVRTC_OPTIONS = ("-std=c++17", *(option.replace("-ftz", "--ftz") for option in _NUMERICS))
NVCC_OPTIONS = ("-std=c++17", *_NUMERICS)

ARGUMENTS = {
    "fold.cu": "Fold",
    "logical.cu": "Logical",
    "round.cu": "Round",
    "ragged.cu": "Ragged",
}


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel, by ptxas: registers and bytes of local memory per thread."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


def compiler() -> str | None:
    """ "nvcc", "nvrtc" (the wheel nvidia-cuda-nvrtc), or None where neither is installed."""
    if shutil.which("nvcc"):
        return "nvcc"
    return "nvrtc" if _nvrtc_library() else None


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
    with tempfile.TemporaryDirectory() as folder:
        made = cubin or Path(folder) / "unit.cubin"
        if shutil.which("nvcc"):
            log = _with_nvcc(text, architecture, Path(folder), made)
        else:
            log = _with_nvrtc(text, architecture, made)
    found = dict(_parse(log))
    return {kernel: found[mangled(kernel)] for kernel in kernels}


def _with_nvcc(text: str, architecture: str, folder: Path, made: Path) -> str:
    source = folder / "unit.cu"
    source.write_text(text)
    command = ["nvcc", "-cubin", f"-arch={architecture}", *NVCC_OPTIONS, "-Xptxas=-v"]
    command += [f"-I{SOURCES}", str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvcc -arch={architecture}:\n{done.stderr}")
    return done.stderr


def _nvrtc_library() -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec else []
    libraries = [path for place in places for path in Path(place).glob("*/lib/libnvrtc.so.*")]
    return min(libraries, default=None)


def _with_nvrtc(text: str, architecture: str, made: Path) -> str:
    path = _nvrtc_library()
    if path is None:
        raise FileNotFoundError("neither nvcc nor the wheel nvidia-cuda-nvrtc is installed")
    nvrtc = ctypes.CDLL(str(path))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"unit.cu", 0, None, None)
    options = [*NVRTC_OPTIONS, f"-I{SOURCES}", f"-arch={architecture}", "--ptxas-options=-v"]
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    message = log.value.decode()
    if failed:
        raise RuntimeError(f"NVRTC for {architecture}:\n{message}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    made.write_bytes(code.raw)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return message


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
