"""The GPUs that can back simulated IPUs: those that CUDA lets this process use, in its order."""

from __future__ import annotations

from dataclasses import dataclass

from gpusim.devices import probes

__all__ = ["Gpu", "gpus", "same_form"]


@dataclass(frozen=True)
class Gpu:
    """A GPU as CUDA numbers it, which CUDA_VISIBLE_DEVICES decides; NVML knows it by `pci_id`."""

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
        Gpu(gpu["index"], gpu["name"], gpu["memory_bytes"], same_form(gpu.get("pci_id")))
        for gpu in found
    )


def same_form(pci_id: str | None) -> str | None:
    """A PCI id as Linux writes it: CUDA writes capitals, NVML eight digits for the domain.

    >>> same_form("00000000:1A:00.0")
    '0000:1a:00.0'
    """
    if pci_id is None:
        return None
    domain, _, rest = pci_id.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"
