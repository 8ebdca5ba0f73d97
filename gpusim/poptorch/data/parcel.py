"""How a dataset gets to the process that reads it: SharingStrategy's four ways.
It is pickled as multiprocessing pickles what a process is started with."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import tempfile
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # what pickles tensors as shared memory
from torch import Tensor

from gpusim.poptorch._logging import logger
from gpusim.poptorch.enums import SharingStrategy
from gpusim.poptorch.replicas.structures import PARSERS

__all__ = ["Parcel", "context_of"]

START_METHODS = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}
NOT_PICKLED = (
    "the dataset has to be pickled for SharingStrategy.{}: what it consists of has to be defined "
    "at the top level of a module. SharingStrategy.Fork needs no pickling."
)


class Parcel:
    """A dataset on its way; `open` gives it, in the process that it was sent to.

    Shared memory moves its tensors there, for both processes; the others give the new process
    tensors of its own. Parsers of users' types go with it.

    PicklingError and the like, with a note, when a process is started with what cannot be pickled.
    """

    def __init__(self, dataset: Any, strategy: SharingStrategy) -> None:
        self._dataset, self._strategy = dataset, strategy
        self._file: Any = None

    def open(self) -> Any:
        """The dataset."""
        return self._dataset

    def __reduce__(self) -> tuple[Any, ...]:
        contents = (self._dataset, {kind: PARSERS[kind] for kind in PARSERS if sent(kind)})
        try:
            return self._packed(contents)
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            error.add_note(NOT_PICKLED.format(self._strategy.name))
            raise

    def _packed(self, contents: Any) -> tuple[Any, ...]:
        if self._strategy is not SharingStrategy.FileSystem:
            shared = self._strategy is SharingStrategy.SharedMemory
            file: Any = io.BytesIO()
            (ForkingPickler if shared else ByValue)(file).dump(contents)
            return Packed, (file.getvalue(),)
        logger.debug(
            "Serialising dataset to file: %s", "an unnamed one in " + tempfile.gettempdir()
        )
        # unnamed: it is gone with the last process that has it open, however that ends
        self._file = tempfile.TemporaryFile()  # open until the process has it
        ByValue(self._file).dump(contents)
        self._file.flush()
        return Packed, (DupFd(self._file.fileno()),)

    def close(self) -> None:
        """The process has been started, and has what it needs."""
        if self._file is not None:
            self._file.close()


class Packed:
    """A parcel that has arrived and is still closed, so that errors are those of opening it."""

    def __init__(self, contents: Any) -> None:
        self._contents = contents

    def open(self) -> Any:
        """The dataset; parsers are registered."""
        dataset, parsers = pickle.loads(self._bytes())
        PARSERS.update(parsers)
        return dataset

    def _bytes(self) -> bytes:
        if isinstance(self._contents, bytes):
            return self._contents
        with os.fdopen(self._contents.detach(), "rb") as file:
            file.seek(0)
            return file.read()


def sent(kind: type) -> bool:
    """Whether a type's parser can be sent; users register types that no dataset has, too."""
    try:
        pickle.dumps((kind, PARSERS[kind]))
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


class ByValue(ForkingPickler):
    """Pickles tensors by value, and memory that several of them share once.

    ForkingPickler takes a file descriptor for each, of which there are too few for datasets that
    consist of many.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._memory: dict[int, Memory] = {}

    def reducer_override(self, value: Any) -> Any:
        """How to pickle what is a plain tensor on the CPU; all else goes its usual way."""
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
            return NotImplemented
        if value.device.type != "cpu" or value.is_conj() or value.is_neg() or value.requires_grad:
            return NotImplemented
        if value.is_shared():  # somebody means other processes to see changes
            return NotImplemented
        storage = value.untyped_storage()
        memory = self._memory.setdefault(storage.data_ptr(), Memory(storage))
        place = (value.storage_offset(), tuple(value.shape), value.stride())
        return tensor_in, (memory, value.dtype, *place)


class Memory:
    """What tensors are views of."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        flat = torch.empty(0, dtype=torch.uint8).set_(self.storage)
        data: Any = flat.numpy()
        return memory_of, (pickle.PickleBuffer(data),)


def memory_of(data: bytearray) -> Memory:
    if not data:
        return Memory(torch.UntypedStorage(0))
    return Memory(torch.frombuffer(data, dtype=torch.uint8).untyped_storage())


def tensor_in(
    memory: Memory,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(memory.storage, offset, shape, stride)


def context_of(strategy: SharingStrategy) -> Any:
    """What starts processes as a strategy says."""
    return multiprocessing.get_context(START_METHODS[strategy])
