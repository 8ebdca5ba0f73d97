"""Compile the kernels for this CPU, by the Clang of the package ziglang, and load them.
Libraries are kept in the cache of compiled kernels, by their sources, options and CPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpusim.fallback import kernels

from ..cuda.cache import cached, once
from ..cuda.compile import SOURCES as CUDA_SOURCES

SOURCES = Path(__file__).parent
TILE = 2048  # elements that a kernel folds at a time: 8 KiB of float32

# Each operation is rounded on its own.
OPTIONS = (
    f"-DTILE={TILE}",
    *("-std=c++20", "-O3", "-mcpu=native", "-ffp-contract=off", "-fno-strict-aliasing"),
    *("-fno-exceptions", "-fno-rtti", "-shared", "-fPIC", "-fvisibility=hidden", "-s", "-w"),
    # The kernels need no library beyond Python's own; zig would compile parts of its C library.
    *(["-nostdlib"] if sys.platform == "linux" else []),
    *(["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []),
)
ANNOUNCED = 2.0  # seconds after which a compilation is announced
BOUND = 120.0  # seconds that it may take


@cache
def compiler() -> Path | None:
    """The compiler's executable; None if ziglang is not installed, or lacks it."""
    found = find_spec("ziglang")
    if found is None or found.origin is None:
        return None
    name = "zig.exe" if sys.platform == "win32" else "zig"
    path = Path(found.origin).parent / name
    return path if path.exists() else None


#: Types of arguments: an address, an integer, and a word without a sign.
ADDRESS, INTEGER, WORD = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_ulonglong


@once
def library(unit: str) -> ctypes.CDLL:
    """The library of a translation unit, compiled unless these sources were compiled before.

    **Raises**: RuntimeError with the compiler's messages if it fails or takes too long; OSError if
    the library cannot be loaded.
    """
    key = repr((unit, _sources_digest(), OPTIONS, version("ziglang"), processor()))
    name = f"{hashlib.sha256(key.encode()).hexdigest()}.so"
    return _load(cached(name, lambda: compile_unit(unit)))


def functions(unit: str, size: int, **signatures: tuple[Any, ...]) -> Any:
    """The functions of a unit's library, or None where it cannot be compiled.

    **Arguments**:

    - `size`: the bytes of the unit's structs, as its function `bytes` adds them up.
    - `signatures`: the types of each function's arguments. None returns a value.

    **Raises**: RuntimeError if it cannot be compiled, and GPUSIM_KERNELS=compiled.
    """
    try:
        found = library(unit)
    except (OSError, RuntimeError) as error:
        kernels.give_up(str(error))
        return None
    assert found.bytes() == size, unit
    for name, types in signatures.items():
        function = getattr(found, name)
        function.argtypes, function.restype = types, None
    return found


@cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in (*sorted(SOURCES.glob("*.h")), *sorted(CUDA_SOURCES.glob("*.cuh"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def processor() -> str:
    """The CPU and its instructions, as the system tells them."""
    lines = [platform.system(), platform.machine(), platform.processor()]
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "\n".join(lines)
    first = text.split("\n\n", 1)[0].splitlines()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join([*lines, *(line for line in first if line.startswith(wanted))])


def compile_unit(unit: str) -> bytes:
    """The library of a translation unit, compiled in a folder of its own."""
    zig = compiler()
    if zig is None:
        raise RuntimeError("compiled kernels need ziglang: pip install 'gpusim[fast]'")
    with tempfile.TemporaryDirectory(prefix="gpusim-") as folder, _announced():
        source, made = Path(folder) / "unit.cpp", Path(folder) / "unit.so"
        source.write_text(unit)
        include = [f"-I{path}" for path in (SOURCES, CUDA_SOURCES)]
        command = [str(zig), "c++", *OPTIONS, *include, str(source), "-o", str(made)]
        own = {"ZIG_LOCAL_CACHE_DIR": folder, "ZIG_GLOBAL_CACHE_DIR": folder}
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=BOUND,
                check=False,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **own},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"compiling kernels: {error}") from error
        if done.returncode:
            raise RuntimeError(f"compiling kernels: {done.stderr.strip()}")
        return made.read_bytes()


@contextmanager
def _announced() -> Iterator[None]:
    """Say on standard error that kernels are compiled, if it takes a while."""

    def announce() -> None:
        print("gpusim: compiling kernels for this CPU, once ...", file=sys.stderr, flush=True)

    timer = threading.Timer(ANNOUNCED, announce)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _load(content: bytes) -> ctypes.CDLL:
    """Load a library from a file that only this user can read, which does not stay."""
    handle, name = tempfile.mkstemp(prefix="gpusim-", suffix=".so")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        return ctypes.CDLL(name)
    finally:
        with suppress(OSError):  # Windows keeps a file that is loaded
            os.unlink(name)
