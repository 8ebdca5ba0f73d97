"""What NVML knows about the GPUs, as gc-info's attributes.

NVML may crash or hang, so `ask` runs this file in a process of its own (see `probes.py`),
where it imports nothing of gpusim.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["ask"]

PATIENCE = 10.0  # seconds; a driver that is loaded for each call takes one or two
GIGATRANSFERS = {
    1: "2.5",
    2: "5.0",
    3: "8.0",
    4: "16.0",
    5: "32.0",
    6: "64.0",
}  # by PCIe generation

Query = Callable[[Any, Any], str]  # of the module pynvml and a GPU's handle

QUERIES: Mapping[str, Query] = {
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


def ask() -> dict[str, Any]:
    """{"gpus": [{"pci id": ..., attribute: ...}, ...]}, or {"problem": why not}; raises nothing."""
    from gpusim.devices import probes

    return probes.ask("nvml", PATIENCE, __file__)


def survey() -> dict[str, Any]:
    """The attributes of every GPU that answers; those that it does not know are missing."""
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
        found.append({"pci id": pci_id} | answers(pynvml, gpu))
    return {"gpus": found}


def answers(nvml: Any, gpu: Any) -> dict[str, str]:
    """What the queries give; a GPU, its driver or an old NVML may support any of them or not."""
    known = {}
    for key, query in QUERIES.items():
        try:
            known[key] = query(nvml, gpu)
        except Exception:
            continue
    return known


def process_ids(processes: Any) -> str:
    return ", ".join(str(process.pid) for process in processes) or "none"


def text(value: str | bytes) -> str:
    """Older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__":
    try:
        answer = survey()
    except Exception as error:  # NVML's own errors: no driver, no permission, another version, ...
        answer = {"problem": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(answer))
