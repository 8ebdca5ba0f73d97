"""Questions to drivers and the libraries on top of them, which may crash or hang who asks.

`ask` puts each to a process of its own, which runs this file and imports nothing of gpusim.
"""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["PROBES", "ask"]

PATIENCE = 30  # seconds: CuPy's first import on a cold disk takes some ten


def ask(name: str, patience: float = PATIENCE, script: str = __file__) -> dict[str, Any]:
    """The answer of the probe `name`, or {"problem": why there is none}; raises nothing.

    `script` is the file that has the probe: this one, or another of its kind.
    """
    command = [sys.executable, "-P", script, name]  # -P: its folder's files are no modules
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=patience, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"no answer within {patience:g} s"}
    if done.returncode < 0:
        return {"problem": f"crashed with {signal.Signals(-done.returncode).name}"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"problem": said[-1]}
    return answer


def cuda() -> dict[str, Any]:
    """The NVIDIA driver's version and its devices, asked of the driver itself."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"problem": "no NVIDIA driver"}

    def call(function: str, *arguments: Any) -> None:
        code = getattr(driver, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            driver.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise RuntimeError(f"{function}: error {code}, {reason}")

    version, count = ctypes.c_int(), ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(version))
    call("cuInit", 0)
    call("cuDeviceGetCount", ctypes.byref(count))
    devices = []
    for index in range(count.value):
        device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
        call("cuDeviceGet", ctypes.byref(device), index)
        call("cuDeviceGetName", name, len(name), device)
        call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
        found = {"index": index, "name": name.value.decode(), "memory_bytes": memory.value}
        pci_id = ctypes.create_string_buffer(32)
        if driver.cuDeviceGetPCIBusId(pci_id, len(pci_id), device) == 0:  # else it is not known
            found["pci_id"] = pci_id.value.decode()
        devices.append(found)
    return {"cuda": dotted(version.value, 1000, 10), "devices": devices}


def cupy() -> dict[str, Any]:
    """CuPy's version, that of its CUDA runtime, and NCCL's (None without it)."""
    import cupy
    from cupy.cuda import nccl

    return {
        "version": cupy.__version__,
        "cuda": dotted(cupy.cuda.runtime.runtimeGetVersion(), 1000, 10),
        "nccl": dotted(nccl.get_version(), 10000, 100) if nccl.available else None,
        "devices": cupy.cuda.runtime.getDeviceCount(),
    }


def mpi() -> dict[str, Any]:
    """The versions of mpi4py and of the MPI library, without initialising MPI."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return {"version": mpi4py.__version__, "library": MPI.Get_library_version().splitlines()[0]}


def dotted(number: int, major: int, minor: int) -> str:
    """CUDA's 13020 (major 1000, minor 10) is 13.2, NCCL's 22703 (10000, 100) is 2.27."""
    return f"{number // major}.{number % major // minor}"


PROBES: dict[str, Callable[[], dict[str, Any]]] = {"cuda": cuda, "cupy": cupy, "mpi": mpi}


if __name__ == "__main__":
    try:
        found = PROBES[sys.argv[1]]()
    except Exception as error:  # a broken installation raises anything
        found = {"problem": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(found))
