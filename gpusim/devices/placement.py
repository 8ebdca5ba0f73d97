"""The placement of simulated IPUs: on a GPU and one of its streams, or on the host."""

from __future__ import annotations

from dataclasses import dataclass

from gpusim.devices.table import Ipu

__all__ = ["Placement", "place"]


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
    if gpus == 0:
        return Placement(None, number)
    slot, gpu = divmod(number, gpus)
    return Placement(gpu, slot)
