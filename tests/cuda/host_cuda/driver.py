"""CuPy's NVRTC and modules, for stand-ins: a "cubin" is a source, which the host's build runs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpusim.cuda import compile as compiling
from gpusim.cuda import structs, templates
from gpusim.cuda.device import Kernel, Launch
from tests.cuda.host_cuda.device import HostDevice

HOST = HostDevice()
ONE_AT_A_TIME = threading.Lock()  # the host's build has one blockIdx for all


@cache
def kernels() -> dict[str, Kernel]:
    """All instances, by the names that compilers give them."""
    units = templates.units().values()
    return {compiling.mangled(kernel): kernel for unit in units for kernel in unit}


class Nvrtc:
    """cupy.cuda.nvrtc; `compiled` lists the sources and options of what was compiled."""

    NVRTCError = RuntimeError

    def __init__(self) -> None:
        self._programs: dict[int, bytes] = {}
        self._numbers = itertools.count(1)
        self.compiled: list[tuple[str, tuple[str, ...]]] = []

    def getVersion(self) -> tuple[int, int]:
        return 13, 0

    def createProgram(self, source: str, name: str, headers: Any, include_names: Any) -> int:
        number = next(self._numbers)
        self._programs[number] = source.encode() + b"\0"
        return number

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        flushing = [option for option in options if "ftz" in option or "fast_math" in option]
        assert flushing[-1].lstrip("-") == "ftz=false", "NVRTC obeys the last option"
        assert "--fmad=false" in options and "-arch=sm_90" in options
        self.compiled.append((self._programs[program].decode(), options))

    def getCUBIN(self, program: int) -> bytes:
        return self._programs[program][:-1]  # as CuPy: without the last byte

    def getProgramLog(self, program: int) -> str:
        return ""

    def destroyProgram(self, program: int) -> None:
        del self._programs[program]


def driver(launched: Callable[[np.ndarray], None] = lambda arguments: None) -> dict[str, Any]:
    """The parts `nvrtc`, `function` and `driver` of cupy.cuda; `launched` is told of each launch's
    struct."""

    class Module:
        """cupy.cuda.function.Module: finds a kernel by its mangled name, and runs the host's."""

        def load(self, cubin: bytes) -> None:
            assert cubin.endswith(b"\0") and type(cubin) is bytes
            self.source = cubin.decode()

        def get_function(self, name: str) -> Any:
            kernel = kernels()[name]
            assert kernel.source in self.source
            assert kernel.name in self.source or "<" not in kernel.name

            def run(grid: Any, block: Any, arguments: Any, shared_mem: int = 0) -> None:
                (given,) = arguments
                # Of a struct, CuPy would read the fields' names and types on every launch.
                assert type(given) is np.ndarray and given.size == 1 and given.dtype.names is None
                struct = given.view(structs.OF_SOURCE[kernel.source])
                made = Launch(kernel, struct, grid[0] * block[0], block[0], shared_mem)
                with ONE_AT_A_TIME:
                    HOST.run(made)
                    HOST.launches.clear()
                launched(struct)

            run.ptr = name
            return run

    def set_attribute(function: str, attribute: int, value: int) -> None:
        assert function in kernels() and (attribute, value) == (9, 100)

    return {
        "nvrtc": Nvrtc(),
        "function": SimpleNamespace(Module=Module),
        "driver": SimpleNamespace(
            funcSetAttribute=set_attribute, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=9
        ),
    }
