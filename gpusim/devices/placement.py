"""The placement of simulated IPUs: on a GPU and one of its streams, or on the host.

The GPUs are those that CUDA lets this process use.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpusim.devices.table import Ipu
from gpusim.runtime import probes

__all__ = ["Gpu", "Placement", "gpus", "normal_pci_id", "place"]


@dataclass(frozen=True)
class Placement:
    """A GPU, by CUDA's number (None is the host), and the slot of the IPU on it, from 0.

    Each slot of a GPU is a stream.
    """

    gpu: int | None
    slot: int

    def __str__(self) -> str:
        return "host" if self.gpu is None else f"GPU {self.gpu}, stream {self.slot}"


def place(ipu: Ipu | int, gpus: int) -> Placement:
    """Return the placement of IPU k: GPU k mod `gpus`, or the host without GPUs.

    >>> [str(place(k, gpus=2)) for k in range(4)]
    ['GPU 0, stream 0', 'GPU 1, stream 0', 'GPU 0, stream 1', 'GPU 1, stream 1']
    >>> place(3, gpus=0)
    Placement(gpu=None, slot=3)
    """
    number = ipu.id if isinstance(ipu, Ipu) else ipu
    if number < 0 or gpus < 0:
        raise ValueError(f"ipu={number}, gpus={gpus}: expected numbers of at least 0")
    return Placement(Ipu(number).gpu_of(gpus), number // max(1, gpus))


@dataclass(frozen=True)
class Gpu:
    """A GPU, by its number in CUDA and in CUDA_VISIBLE_DEVICES; NVML finds it by `pci_id`."""

    index: int
    name: str
    memory_bytes: int
    pci_id: str | None = None


def gpus() -> tuple[Gpu, ...]:
    """The usable GPUs; none without a driver that works.

    Each call asks the driver in another process. `gpusim info` says what is wrong.
    """
    found = probes.ask("cuda").get("devices", ())
    return tuple(
        Gpu(gpu["index"], gpu["name"], gpu["memory_bytes"], normal_pci_id(gpu.get("pci_id")))
        for gpu in found
    )


def normal_pci_id(pci_id: str | None) -> str | None:
    """A PCI id in Linux's form. CUDA writes capitals, NVML eight digits for the domain.

    >>> normal_pci_id("00000000:1A:00.0")
    '0000:1a:00.0'
    """
    if pci_id is None:
        return None
    domain, _, rest = pci_id.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"
