"""HostDevice: runs the kernels' launches on NumPy arrays, from shared libraries made by g++.
A library per translation unit, kept in the temporary folder under its sources' hash."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpusim.compiled.build import SOURCES as COMPILED
from gpusim.cuda import ragged, rounding, run, sends, templates
from gpusim.cuda.compile import ARGUMENTS, SOURCES
from gpusim.cuda.device import Kernel, Launch
from gpusim.fallback.spec import run_arguments
from tests.oracles.machine_time import PATIENCE

HERE = Path(__file__).parent
HEADERS = HERE / "cuda_on_host.h", HERE / "fibers.h", COMPILED / "cuda_bits.h"
BARRIER = re.compile(r"__sync|__shfl|__all_sync")
# No fused multiply-add, no extended precision: each operation is rounded as CUDA rounds it.
OPTIONS = ["-O1", "-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC"]
COMPILER = os.environ.get("CXX", "g++")


def has_compiler() -> bool:
    return shutil.which(COMPILER) is not None


def unit_source(kernels: list[Kernel]) -> str:
    """A translation unit that holds instances of one source file's templates."""
    (source,) = {kernel.source for kernel in kernels}
    lines = ["#define FAKE_BARRIERS"] if BARRIER.search((SOURCES / source).read_text()) else []
    lines += ['#include "cuda_on_host.h"', f'#include "{source}"']
    for number, kernel in enumerate(kernels):
        lines.append(f"KERNEL({number}, {ARGUMENTS[source]}, {kernel.name})")
    return "\n".join(lines) + "\n"


@cache
def library(unit: str) -> ctypes.CDLL:
    """Compile a translation unit, unless these sources have been compiled before."""
    text = unit_source(templates.units()[unit])
    files = [*sorted(SOURCES.glob("*.cu*")), *HEADERS]
    digest = hashlib.sha256("\n".join([text, COMPILER, *OPTIONS]).encode())
    for file in files:
        digest.update(file.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"gpusim-host-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid(), f"{folder} belongs to another user"
    built = folder / f"{unit.replace(' ', '-')}-{digest.hexdigest()[:16]}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            source, made = Path(work) / "unit.cpp", Path(work) / "unit.so"
            source.write_text(text)
            include = [f"-I{HERE}", f"-I{SOURCES}"]
            command = [COMPILER, *OPTIONS, *include, str(source), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
            assert done.returncode == 0, done.stderr
            made.replace(built)  # at once: another process may be looking
    return ctypes.CDLL(str(built))


class HostDevice:
    """The device's side of gpusim.cuda on NumPy arrays; `launches` lists what was run."""

    shared_bytes = 228 << 10

    def __init__(self, busy_threads: int = 0) -> None:
        self.busy_threads = busy_threads
        self.launches: list[Launch] = []
        self._numbers = {
            kernel: (unit, number)
            for unit, kernels in templates.units().items()
            for number, kernel in enumerate(kernels)
        }
        self.run_fold = partial(run.run_fold, self)
        self.round_to = partial(rounding.round_to, self)
        self.round_to_wire = partial(sends.round_to_wire, self)
        self.ragged_copy = partial(ragged.ragged_copy, self)

    def fold(self, members: Any, **keywords: Any) -> NDArray[Any]:
        """`fallback.fold` on this device."""
        result: NDArray[Any] = self.run_fold(members=members, **run_arguments(**keywords))
        return result

    def is_array(self, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def pointer(self, array: NDArray[Any]) -> int:
        return array.ctypes.data

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        # Poisoned, so that what no thread writes is seen.
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = 0xA5
        return array

    def upload(self, values: NDArray[Any]) -> NDArray[Any]:
        return np.array(values, order="C")

    def constant(self, data: bytes) -> NDArray[Any]:
        return np.frombuffer(data, np.uint8)

    def download(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def contiguous(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.ascontiguousarray(array)

    def run(self, launch: Launch) -> None:
        unit, number = self._numbers[launch.kernel]
        compiled = library(unit)
        assert getattr(compiled, f"bytes_{number}")() == launch.arguments.nbytes
        before = compiled.count_misaligned()
        wrong = getattr(compiled, f"kernel_{number}")(
            ctypes.c_uint(launch.grid),
            ctypes.c_uint(launch.block),
            ctypes.c_ulonglong(launch.shared),
            ctypes.c_void_p(launch.arguments.ctypes.data),
        )
        assert not wrong, f"{launch.kernel}: threads of a block wait at different barriers"
        assert compiled.count_misaligned() == before, f"{launch.kernel}: misaligned access"
        self.launches.append(launch)
