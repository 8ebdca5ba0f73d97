"""How datasets and elements get from one process to another.

A dataset is pickled as multiprocessing pickles what a process is started with. An element's tensors
are copied into shared memory without a name, and its structure is pickled beside them.
"""

from __future__ import annotations

import functools
import io
import math
import os
import pickle
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from typing import Any

import torch
import torch.multiprocessing  # registers how tensors move to shared memory
from torch import Tensor, UntypedStorage

from gpusim.poptorch.enums import SharingStrategy
from gpusim.poptorch.replicas.structures import PARSERS

__all__ = ["Payload", "opened", "receive_memory", "send_element"]

NOT_PICKLED = (
    "the dataset has to be pickled for SharingStrategy.{}: what it consists of has to be defined "
    "at the top level of a module. SharingStrategy.Fork needs no pickling."
)
ALIGNMENT = 64  # bytes: a cache line, and a multiple of every dtype's size

Place = tuple[int, torch.dtype, tuple[int, ...]]
"""A tensor in a memory: the first byte, dtype and shape."""


class Payload:
    """A dataset for another process, where calling it returns the dataset.

    SharedMemory moves the tensors of the dataset to shared memory; the other strategies give the
    process copies. Parsers of users' types are registered there too.

    **Raises**:

    - PicklingError and the like, with a note: if the dataset cannot be pickled, when a process that
      is not forked is started.
    """

    def __init__(self, dataset: Any, strategy: SharingStrategy) -> None:
        self._dataset, self._strategy = dataset, strategy

    def __call__(self) -> Any:
        return self._dataset

    def __reduce__(self) -> tuple[Any, ...]:
        shared = self._strategy is SharingStrategy.SharedMemory
        parsers = {kind: PARSERS[kind] for kind in PARSERS if can_be_pickled((kind, PARSERS[kind]))}
        file = io.BytesIO()
        try:
            pickler = (ForkingPickler if shared else ByValue)(file, pickle.HIGHEST_PROTOCOL)
            pickler.dump((self._dataset, parsers))
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            error.add_note(NOT_PICKLED.format(self._strategy.name))
            raise
        return functools.partial, (unpickled, file.getvalue())


def unpickled(data: bytes) -> Any:
    """A Payload's dataset; its errors are those of the call, not of the start of the process."""
    dataset, parsers = pickle.loads(data)
    PARSERS.update(parsers)
    return dataset


def can_be_pickled(value: Any) -> bool:
    """Whether a value can be pickled and made again."""
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:  # anything that its class raises
        return False
    return True


class ByValue(ForkingPickler):
    """Pickles by value the memory of tensors that is not shared yet.

    ForkingPickler takes a file descriptor for each tensor. A dataset may consist of more tensors
    than a process may have descriptors.
    """

    def reducer_override(self, value: Any) -> Any:
        """Override how memory is pickled. Views of one memory share it again."""
        if not isinstance(value, UntypedStorage) or value.device.type != "cpu" or value.is_shared():
            return NotImplemented
        content: Any = torch.empty(0, dtype=torch.uint8).set_(value).numpy()
        return storage_of, (pickle.PickleBuffer(content),)


def storage_of(data: bytearray) -> UntypedStorage:
    """The memory with these bytes."""
    content = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
    return content.untyped_storage()


# ---------------------------------------------------------------- elements


class ElementPickler(ForkingPickler):
    """Pickles a structure without the data of its tensors, which it collects with their places."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[tuple[Tensor, Place]] = []
        self.size = ALIGNMENT  # torch shares no empty memory

    def persistent_id(self, value: Any) -> Place | None:
        """A tensor's place in the memory of its element."""
        if not isinstance(value, Tensor):
            return None
        place = self.size, value.dtype, tuple(value.shape)
        self.size += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
        self.tensors.append((value.detach(), place))
        return place


class ElementUnpickler(pickle.Unpickler):
    """Unpickles a structure with tensors that are views of a memory."""

    def __init__(self, structure: bytes, memory: UntypedStorage) -> None:
        super().__init__(io.BytesIO(structure))
        self._memory = memory

    def persistent_load(self, place: Place) -> Tensor:
        """The tensor at a place."""
        return tensor_at(self._memory, place)


def tensor_at(memory: UntypedStorage, place: Place) -> Tensor:
    begin, dtype, shape = place
    first = begin // dtype.itemsize
    flat = torch.empty(0, dtype=dtype).set_(memory)
    return flat[first : first + math.prod(shape)].view(shape)


def send_element(
    connection: Connection, epoch: int, slot: int, memories: dict[int, UntypedStorage], element: Any
) -> None:
    """Send `(epoch, slot, structure, size)`.

    The element lies in the slot's memory. If that is too small, the size is that of new memory,
    which follows, and 0 otherwise. Memory has no name. It outlives this process if it is on its way
    when the process ends.
    """
    file = io.BytesIO()
    pickler = ElementPickler(file)
    pickler.dump(element)
    grown = slot not in memories or memories[slot].nbytes() < pickler.size
    if grown:
        memories[slot] = UntypedStorage._new_using_fd_cpu(pickler.size)
    for tensor, place in pickler.tensors:
        tensor_at(memories[slot], place).copy_(tensor)
    connection.send((epoch, slot, file.getvalue(), pickler.size if grown else 0))
    if grown:
        send_handle(connection, memories[slot]._share_fd_cpu_()[0], os.getppid())


def receive_memory(connection: Connection, size: int) -> UntypedStorage:
    """Receive the new memory of a slot."""
    descriptor = recv_handle(connection)
    kind: Any = UntypedStorage  # whose annotations lack this method
    try:
        memory: UntypedStorage = kind._new_shared_fd_cpu(descriptor, size)
    finally:
        os.close(descriptor)
    return memory


def opened(structure: bytes, memory: UntypedStorage) -> Any:
    """The element, whose tensors lie in the memory."""
    return ElementUnpickler(structure, memory).load()
