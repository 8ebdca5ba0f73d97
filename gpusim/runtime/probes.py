"""The machine's memory, and questions to drivers and libraries, each asked in another process.

A driver may crash or hang the process that asks. `ask` therefore runs this file as a script. The
script imports nothing of gpusim.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["PROBES", "ask", "memory_bytes"]

# Seconds. CuPy's first import on a cold disk takes some ten; a driver that is loaded for each call
# takes one or two.
PATIENCE = {"cuda": 30.0, "cupy": 30.0, "mpi": 30.0, "nvml": 10.0}


def ask(name: str, patience: float | None = None) -> dict[str, Any]:
    """The answer of the probe `name`, or {"problem": why it failed}; raises nothing.

    `patience` is the number of seconds to wait; the default depends on the probe.
    """
    patience = PATIENCE[name] if patience is None else patience
    command = [sys.executable, "-P", __file__, name]  # -P: no imports from the script's folder
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
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"problem": lines[-1]}
    return answer


def memory_bytes() -> int | None:
    """The machine's memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


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
    """The versions of CuPy, its CUDA runtime and NCCL (None without NCCL)."""
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


def nvml() -> dict[str, Any]:
    """NVML's knowledge of every GPU that answers, as gc-info's attributes."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return {"problem": "nvidia-ml-py is not installed: pip install 'gpusim[cuda13]'"}
    pynvml.nvmlInit()
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            pci_id = text(pynvml.nvmlDeviceGetPciInfo(gpu).busId)
        except Exception:  # a GPU that fell off its bus must not hide the others
            continue
        known = {"pci id": pci_id}
        for key, query in NVML_QUERIES.items():
            try:
                known[key] = query(pynvml, gpu)
            except Exception:  # the GPU, its driver or an old NVML does not support it
                continue
        found.append(known)
    return {"gpus": found}


# by PCIe generation
GIGATRANSFERS = {1: "2.5", 2: "5.0", 3: "8.0", 4: "16.0", 5: "32.0", 6: "64.0"}

Query = Callable[[Any, Any], str]  # of the module pynvml and a GPU's handle

NVML_QUERIES: Mapping[str, Query] = {
    "average die temp": lambda nvml, gpu: (
        f"{nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU):.1f} C"
    ),
    "board serial number": lambda nvml, gpu: text(nvml.nvmlDeviceGetSerial(gpu)),
    "board type": lambda nvml, gpu: text(nvml.nvmlDeviceGetName(gpu)),
    "clock": lambda nvml, gpu: f"{nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)}MHz",
    "driver version": lambda nvml, gpu: text(nvml.nvmlSystemGetDriverVersion()),
    "firmware version": lambda nvml, gpu: text(nvml.nvmlDeviceGetVbiosVersion(gpu)),
    "gpu process ids": lambda nvml, gpu: process_ids(
        nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    ),
    "gpu uuid": lambda nvml, gpu: text(nvml.nvmlDeviceGetUUID(gpu)),
    "ipu utilisation": lambda nvml, gpu: f"{nvml.nvmlDeviceGetUtilizationRates(gpu).gpu:.2f}%",
    "link speed": lambda nvml, gpu: (
        f"{GIGATRANSFERS[nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu)]} GT/s"
    ),
    "link width": lambda nvml, gpu: str(nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)),
    "memory total (bytes)": lambda nvml, gpu: str(nvml.nvmlDeviceGetMemoryInfo(gpu).total),
    "memory used (bytes)": lambda nvml, gpu: str(nvml.nvmlDeviceGetMemoryInfo(gpu).used),
    "total board power": lambda nvml, gpu: f"{nvml.nvmlDeviceGetPowerUsage(gpu) / 1000:.1f} W",
}


def process_ids(processes: Any) -> str:
    return ", ".join(str(process.pid) for process in processes) or "none"


def text(value: str | bytes) -> str:
    """Older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value


def dotted(number: int, major: int, minor: int) -> str:
    """CUDA's 13020 (major 1000, minor 10) is 13.2, NCCL's 22703 (10000, 100) is 2.27."""
    return f"{number // major}.{number % major // minor}"


PROBES: dict[str, Callable[[], dict[str, Any]]]
PROBES = {"cuda": cuda, "cupy": cupy, "mpi": mpi, "nvml": nvml}


if __name__ == "__main__":
    try:
        found = PROBES[sys.argv[1]]()
    except Exception as error:  # a broken installation raises anything
        found = {"problem": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(found))
