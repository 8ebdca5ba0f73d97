"""The attributes of simulated IPUs, gc-info's `key: value` lines: measured, or N/A.

They come from NVML where a GPU backs the IPU, else from the host, and from the holder's record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpusim.devices.holders import Holder
from gpusim.devices.host import host_attributes
from gpusim.devices.placement import Gpu, gpus, normal_pci_id, place
from gpusim.devices.table import PARTITION, Ipu
from gpusim.runtime import probes

__all__ = ["ARCHITECTURE", "IPU_VERSION", "KEYS", "UNKNOWN", "Hardware", "attributes", "inspect"]

UNKNOWN = "N/A"
IPU_VERSION = 21  # the generation that has the 8-bit floating-point formats, as gpusim has
ARCHITECTURE = f"ipu{IPU_VERSION}"

KEYS = (
    "average board temp",
    "average die temp",
    "board ipu index",
    "board serial number",
    "board type",
    "clock",
    "driver version",
    "firmware version",
    "gpu process ids",
    "gpu uuid",
    "gpusim backend",
    "ipu architecture",
    "ipu power",
    "ipu utilisation",
    "ipu utilisation (session)",
    "ipuof host",
    "ipuof partition id",
    "ipuof routing type",
    "link speed",
    "link width",
    "memory total (bytes)",
    "memory used (bytes)",
    "pci id",
    "process start time",
    "total board power",
    "user executable",
    "user name",
    "user process id",
)


@dataclass(frozen=True)
class Hardware:
    """Measurements of the GPUs and of the host, which all IPUs share.

    `problem` says why NVML does not answer although there are GPUs.
    """

    gpus: tuple[Gpu, ...]
    measured: Mapping[str, Mapping[str, str]]  # by PCI id
    host: Mapping[str, str]
    problem: str | None = None


def inspect() -> Hardware:
    """Ask the driver, NVML and the operating system; raises nothing, whatever is broken."""
    usable = gpus()
    answer = probes.ask("nvml") if usable else {}
    found = {normal_pci_id(gpu["pci id"]): gpu for gpu in answer.get("gpus", ())}
    measured = {
        gpu.pci_id: found[gpu.pci_id]
        for gpu in usable
        if gpu.pci_id is not None and gpu.pci_id in found
    }
    return Hardware(usable, measured, host_attributes(), answer.get("problem"))


def attributes(
    ipu: Ipu, hardware: Hardware | None = None, holder: Holder | None = None
) -> dict[str, str]:
    """Every attribute of an IPU by key, sorted; N/A where nothing is known.

    Measurements of a GPU are those of the whole GPU, for each of its IPUs.

    **Arguments**

    - `hardware`: the result of `inspect`, which is called without it.
    - `holder`: the process that is attached to the IPU, from `holders`; None if the IPU is free.
    """
    hardware = hardware or inspect()
    known = measured(ipu, hardware) | simulated(ipu, hardware) | used_by(holder)
    return {key: known.get(key) or UNKNOWN for key in KEYS}


def measured(ipu: Ipu, hardware: Hardware) -> dict[str, str]:
    """The attributes of the GPU or the host that the IPU is on."""
    placement = place(ipu, len(hardware.gpus))
    if placement.gpu is None:
        return dict(hardware.host)
    gpu = hardware.gpus[placement.gpu]
    driver = {"board type": gpu.name, "memory total (bytes)": str(gpu.memory_bytes)}
    if gpu.pci_id is None:
        return driver
    return driver | dict(hardware.measured.get(gpu.pci_id, {})) | {"pci id": gpu.pci_id}


def simulated(ipu: Ipu, hardware: Hardware) -> dict[str, str]:
    """The attributes that follow from the IPU's number."""
    return {
        "board ipu index": str(ipu.number),
        "gpusim backend": str(place(ipu, len(hardware.gpus))),
        "ipu architecture": ARCHITECTURE,
        "ipuof host": ipu.host,
        "ipuof partition id": PARTITION,
        "ipuof routing type": "DNC",
    }


def used_by(holder: Holder | None) -> dict[str, str]:
    """The attributes of the holder, from its record."""
    if holder is None:
        return {}
    return {
        "process start time": f"{holder.started:%Y%m%dT%H%M%SZ}" if holder.started else "",
        "user executable": holder.command or "",
        "user name": holder.user or "",
        "user process id": "" if holder.pid is None else str(holder.pid),
    }
