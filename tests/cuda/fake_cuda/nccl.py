"""cupy.cuda.nccl of the fake CUDA: between the ranks of an MPI program, or within one process.

Kernels of the fake end before their launch returns, so a group of sends and receives may end with
its `groupEnd`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

available = True
PATIENCE = 60.0  # seconds that a rank of this process waits for another one
DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
for _code, _name in enumerate((*DTYPES, "bfloat16")):
    globals()[f"NCCL_{_name.upper()}"] = _code
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = range(4)
OPERATORS = (np.add, np.multiply, np.maximum, np.minimum)

_groups = threading.local()


class NcclError(RuntimeError):
    """As CuPy's."""


def get_version() -> int:
    return 23000


def get_unique_id() -> bytes:
    return os.urandom(128)


def groupStart() -> None:
    _groups.calls = []


def groupEnd() -> None:
    calls, _groups.calls = _groups.calls, None
    pending = [begin() for begin in calls]
    for end in pending:
        end()


def _memory(pointer: int, size: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * size).from_address(pointer), np.uint8)


class NcclCommunicator:
    """A rank's end of a communicator."""

    def __init__(self, ndev: int, commId: bytes, rank: int, config: Any = None) -> None:
        if not isinstance(commId, bytes):
            raise TypeError("Argument 'commId' has incorrect type (expected bytes)")
        between = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1
        self._ranks: Any = _Processes() if between else _Threads.of(commId, ndev)
        self.rank, self.count = rank, ndev

    @staticmethod
    def initAll(devices: list[int]) -> list[NcclCommunicator]:
        identity = get_unique_id()
        return [NcclCommunicator(len(devices), identity, rank) for rank in range(len(devices))]

    def send(self, pointer: int, size: int, kind: int, peer: int, stream: int) -> None:
        data = _memory(pointer, size)
        _groups.calls.append(lambda: self._ranks.send(data, self.rank, peer))

    def recv(self, pointer: int, size: int, kind: int, peer: int, stream: int) -> None:
        data = _memory(pointer, size)
        _groups.calls.append(lambda: self._ranks.receive(data, peer, self.rank))

    def allReduce(
        self, source: int, target: int, size: int, kind: int, op: int, stream: int
    ) -> None:
        dtype = np.dtype(ml_dtypes.bfloat16 if kind == 9 else DTYPES[kind])
        mine, total = (_memory(at, size * dtype.itemsize) for at in (source, target))
        every = np.empty((self.count, mine.size), np.uint8)
        for peer in range(self.count):  # within the caller's group
            _groups.calls.append(lambda peer=peer: self._ranks.send(mine, self.rank, peer))
        for peer in range(self.count):
            _groups.calls.append(
                lambda peer=peer: self._ranks.receive(every[peer], peer, self.rank)
            )

        def reduce() -> None:
            total[:] = OPERATORS[op].reduce(every.view(dtype), axis=0, dtype=dtype).view(np.uint8)

        _groups.calls.append(lambda: reduce)

    def check_async_error(self) -> None:
        pass

    def destroy(self) -> None:
        pass

    def abort(self) -> None:
        pass


class _Processes:
    """Ranks that are the processes of an MPI program."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD.Dup()

    def send(self, data: np.ndarray, own: int, peer: int) -> Any:
        return self._world.Isend(data, peer).Wait

    def receive(self, data: np.ndarray, peer: int, own: int) -> Any:
        return self._world.Irecv(data, peer).Wait


class _Threads:
    """Ranks of this process; by their identity."""

    all: ClassVar[dict[bytes, _Threads]] = {}

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sent: dict[tuple[int, int], list[np.ndarray]] = {}

    @classmethod
    def of(cls, identity: bytes, count: int) -> _Threads:
        return cls.all.setdefault(identity, cls())

    def send(self, data: np.ndarray, own: int, peer: int) -> Any:
        with self._changed:
            self._sent.setdefault((own, peer), []).append(data.copy())
            self._changed.notify_all()
        return lambda: None

    def receive(self, data: np.ndarray, peer: int, own: int) -> Any:
        def end() -> None:
            with self._changed:
                if not self._changed.wait_for(lambda: self._sent.get((peer, own)), PATIENCE):
                    raise NcclError(f"rank {peer} has sent nothing to rank {own}")
                data[:] = self._sent[peer, own].pop(0)

        return end


def install() -> None:
    """Take the place of CuPy's module."""
    import cupy.cuda

    sys.modules["cupy.cuda.nccl"] = cupy.cuda.nccl = sys.modules[__name__]
