"""The ring's slots: how an element lies in shared memory.
Both processes find its tensors from the outline alone."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from gpusim.poptorch.data.elements import Element
from gpusim.poptorch.replicas.structures import flatten

__all__ = ["Slot", "read", "received"]

ALIGNMENT = 64  # bytes: a cache line, and a multiple of every dtype's size


class Slot:
    """Shared memory that one element after the other is copied into; the writer's side."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def write(self, element: Element, outline: Any) -> bool:
        """Copy an element; whether that took new memory, which the reader has to be sent."""
        tensors, _ = flatten(outline)
        size = places(tensors)[-1]
        grown = size > self.memory.numel()
        if grown:
            self.memory = bytes_of(UntypedStorage._new_using_fd_cpu(size))
        for view, pieces in zip(views(self.memory, tensors), element.tensors, strict=True):
            if len(pieces) == 1:
                view.copy_(pieces[0])
            else:
                torch.cat(pieces, out=view)
        return grown

    @property
    def size(self) -> int:
        """In bytes."""
        return self.memory.numel()

    def send(self, connection: Connection, pid: int) -> None:
        """Send the memory itself, as it has no name: what is on its way outlives this process."""
        descriptor, _ = self.memory.untyped_storage()._share_fd_cpu_()
        send_handle(connection, descriptor, pid)


def received(connection: Connection, size: int) -> Tensor:
    """The memory of a slot of so many bytes, which the writer has sent."""
    descriptor = recv_handle(connection)
    kind: Any = UntypedStorage  # PyTorch does not say that it has this method
    try:
        return bytes_of(kind._new_shared_fd_cpu(descriptor, size))
    finally:
        os.close(descriptor)


def bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def read(memory: Tensor, outline: Any) -> Any:
    """An element as views of the memory that it lies in."""
    tensors, rebuild = flatten(outline)
    return rebuild(iter(views(memory, tensors)))


def views(memory: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Where tensors like these lie in a slot."""
    begins = places(tensors)
    return [
        memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for begin, tensor in zip(begins, tensors, strict=False)  # one begin more: the size
    ]


def places(tensors: list[Tensor]) -> list[int]:
    """Each tensor's first byte, and how many bytes all of them take; never none."""
    begins = [0]
    for tensor in tensors:
        begins.append(begins[-1] + -(-max(tensor.nbytes, 1) // ALIGNMENT) * ALIGNMENT)
    return begins
