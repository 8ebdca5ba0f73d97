"""NVRTC by g++: a program becomes a shared library, whose bytes stand for the cubin."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.oracles.machine_time import PATIENCE

HERE = Path(__file__).parent
INCLUDE = HERE / "include"
HEADERS = (  # beside those of INCLUDE
    HERE.parent / "host_cuda" / "cuda_on_host.h",
    HERE.parent / "host_cuda" / "fibers.h",
    HERE.parents[2] / "gpusim" / "compiled" / "cuda_bits.h",
)
COMPILER = os.environ.get("CXX", "g++")
# No fused multiply-add, no extended precision: each operation is rounded as CUDA rounds it. Inline
# variables belong to one library each.
OPTIONS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-gnu-unique")
OPTIONS += ("-fwhole-program", "-shared", "-fPIC", "-w")  # whole: without code for what is unused
if shutil.which("ld.gold"):
    OPTIONS += ("-fuse-ld=gold",)  # links such small libraries in a third of the time
MAGIC = b"fake cubin\0"
IGNORED = re.compile(
    r"--?(arch=|gpu-architecture=|std=|fmad=|prec-div=|prec-sqrt=|ftz=|use_fast_math$"
    r"|no-cache$|device-as-default-execution-space$|extra-device-vectorization$)"
)
BARRIER = re.compile(r"__sync|__shfl|__all_sync|this_thread_block")

_lock = threading.Lock()


def has_compiler() -> bool:
    return shutil.which(COMPILER) is not None


def folder() -> Path:
    """Where compiled programs are kept, which nobody else may write to."""
    made = Path(tempfile.gettempdir()) / f"gpusim-fake-cuda-{os.getuid()}"
    made.mkdir(mode=0o700, exist_ok=True)
    assert made.stat().st_uid == os.getuid(), f"{made} belongs to another user"
    return made


@functools.cache
def fingerprint() -> str:
    """A hash of what every program is compiled with."""
    digest = hashlib.sha256(repr((COMPILER, OPTIONS)).encode())
    digest.update(subprocess.check_output([COMPILER, "--version"]))
    for file in (*sorted(INCLUDE.rglob("*.h")), *HEADERS):
        digest.update(file.read_bytes())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()[:16]


def with_included(source: str, includes: Sequence[Path]) -> str:
    """A source and the .cu files that it includes."""
    text = source
    for name in re.findall(r'^#include "(.+\.cu)"', source, re.MULTILINE):
        (path,) = [place / name for place in includes if (place / name).exists()][:1]
        text += path.read_text()
    return text


def kernels_of(source: str, text: str) -> list[str]:
    """The kernels' names, as C++ expressions, in a source; `text` is that `with_included`."""
    found = re.findall(r"^template\s+__global__\s+void\s+(.+?)\(", source, re.MULTILINE)
    for template, name in re.findall(
        r"(template\s*<[^;{}]*>\s*)?(?:extern\s+\"C\"\s+)?__global__\s+"
        r"(?:__launch_bounds__\([^)]*\)\s+)?void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\s*\(",
        text,
    ):
        if not template:
            found.append(name)
    return list(dict.fromkeys(found))


def flushes(source: str, options: Sequence[str]) -> bool:
    """Whether the kernels flush subnormals: NVRTC takes the last of the options.

    That is about float32 alone, and this machine's mode about float64 too: programs that have
    float64 keep subnormals.
    """
    given = [option for option in options if re.match(r"--?(ftz=|use_fast_math)", option)]
    wanted = bool(given) and not given[-1].endswith("=false")
    return wanted and not re.search(r"\bdouble\b|\bfloat64\b", source)


def build_library(source: str, name: str, options: Sequence[str] = (), versions: str = "") -> Path:
    """A shared library of this C++ source, compiled unless it has been before."""
    key = repr((source, *options, versions, fingerprint()))
    built = folder() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=folder()) as work:
            unit, made, script = (Path(work) / f"unit{end}" for end in (".cpp", ".so", ".map"))
            unit.write_text(source)
            script.write_text(versions)
            command = [COMPILER, "-O1", "-shared", "-fPIC", str(unit), "-o", str(made), *options]
            command += [f"-Wl,--version-script={script}"] if versions else []
            subprocess.run(command, check=True, timeout=PATIENCE)
            made.replace(built)  # at once: another process may be looking
    return built


class CompileError(Exception):
    """What the compiler says."""


#: Finds NVRTC itself (cuda.pathfinder's result), or raises; `install` sets it.
find_nvrtc: Callable[[], Any] | None = None


def nvrtcs_errors(source: str, options: Sequence[str]) -> str:
    """What NVRTC itself says to a source that g++ refuses; "" if it compiles it, or is not here.

    It needs no GPU. So a source that is wrong is told from one that only g++ does not take.
    """
    try:
        library = ctypes.CDLL(find_nvrtc().abs_path) if find_nvrtc else None
    except Exception:  # pathfinder's own, where NVRTC is not installed
        library = None
    if library is None:
        return ""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"unit.cu", 0, None, None)
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = library.nvrtcCompileProgram(program, len(options), given)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode() if failed else ""


def compile_program(source: str, options: Sequence[str], expressions: Sequence[str]) -> bytes:
    """The bytes that a module is loaded from; CompileError with g++'s messages."""
    includes, passed = [INCLUDE], []
    for option in options:
        if match := re.match(r"(?:-I|--include-path=)(.+)", option):
            # CUDA's own headers are not for g++; those that CuPy needs lie in `INCLUDE`.
            if not (Path(match[1]) / "cuda_runtime.h").exists():
                includes.append(Path(match[1]))
        elif option.startswith("-D"):
            passed.append(option)
        elif not IGNORED.match(option):
            raise CompileError(f"nvrtc: error: invalid value for --gpu-architecture: {option}")
    whole = with_included(source, includes)
    kernels = [*expressions, *kernels_of(source, whole)]
    if not kernels:
        raise CompileError("the fake NVRTC finds no kernel in the source")
    if flushes(source, options):
        passed.append("-DFAKE_FLUSH")
    if BARRIER.search(whole):
        passed.append("-DFAKE_BARRIERS")
    # C++ leaves open what wide shifts are.
    text = source.replace("in0 << in1", "shift_left(in0, in1)")
    text = text.replace("in0 >> in1", "shift_right(in0, in1)")
    text = re.sub(
        r"extern\s+__shared__\s+([\w\s:<>]+?)\s+(\w+)\[\];", r"DYNAMIC_SHARED(\1, \2);", text
    )
    entries = ", ".join(f"entry_of({kernel})" for kernel in kernels)
    text += f"\nKERNELS({entries})\n"
    with tempfile.TemporaryDirectory(dir=folder()) as work:
        unit, made = Path(work) / "unit.cpp", Path(work) / "unit.so"
        unit.write_text(text)
        command = [COMPILER, *OPTIONS, *passed, *header(tuple(sorted(passed)))]
        command += [*(f"-I{place}" for place in includes), str(unit), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode:
            said = [" ".join(command), done.stderr, nvrtcs_errors(source, options)]
            raise CompileError("\n".join(said))
        library = made.read_bytes()
    return MAGIC + len(library).to_bytes(8, "little") + library + b"\0"


@functools.cache
def header(passed: tuple[str, ...]) -> tuple[str, ...]:
    """The options that include device.h, compiled beforehand for these macros."""
    key = hashlib.sha256(repr((fingerprint(), passed)).encode()).hexdigest()[:16]
    place = folder() / f"header-{key}"
    built = place / "device.h.gch"
    with _lock:
        if not built.exists():
            place.mkdir(mode=0o700, exist_ok=True)
            (place / "device.h").write_text(f'#include "{INCLUDE / "device.h"}"\n')
            part = place / f"{os.getpid()}.gch"
            command = [COMPILER, *OPTIONS, *passed, "-x", "c++-header"]
            subprocess.run([*command, str(place / "device.h"), "-o", str(part)], check=True)
            part.replace(built)  # at once: another process may be looking
    return ("-include", str(place / "device.h"))


def load(image: int) -> ctypes.CDLL:
    """The module in the bytes at this address."""
    if ctypes.string_at(image, len(MAGIC)) != MAGIC:
        raise ValueError("not compiled by the fake NVRTC")
    size = int.from_bytes(ctypes.string_at(image + len(MAGIC), 8), "little")
    with tempfile.NamedTemporaryFile(dir=folder(), suffix=".so") as file:
        file.write(ctypes.string_at(image + len(MAGIC) + 8, size))
        file.flush()
        loaded = ctypes.CDLL(file.name)
    loaded.fake_launch.restype = ctypes.c_char_p
    return loaded
