"""The engine between processes: mpi4py's buffers, sent and received without waiting.
Waiting is polling, so that Ctrl-C comes through and an instance that is gone is noticed."""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import InstanceError
from . import Buffer

if TYPE_CHECKING:
    from mpi4py import MPI

# The largest message: MPI counts in C ints.
LONGEST = 1 << 30
# Polls before a waiting instance goes to sleep between them, and for how long, in seconds. Others
# may need its core, so it lets them go first from the beginning.
EAGER_POLLS = 500
SHORTEST_SLEEP, LONGEST_SLEEP = 2e-5, 1e-3
# Seconds between looks at whether the others are alive.
WATCH_EVERY = 0.5

_OPERATORS = {
    "sum": "SUM",
    "prod": "PROD",
    "max": "MAX",
    "min": "MIN",
    "logical_and": "LAND",
    "logical_or": "LOR",
}

_engine: MpiEngine | None = None


def connect() -> MpiEngine:
    """The engine of this process, over all that mpirun has started; made on first use.

    Raises:
        ImportError: without mpi4py; names what to install.
    """
    global _engine
    if _engine is None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise ImportError(
                "several instances need mpi4py and an MPI library: pip install 'gpusim[mpi]'"
            ) from error
        _engine = MpiEngine(MPI.COMM_WORLD.Dup())
    return _engine


class MpiEngine:
    """All processes of a communicator; see `gpusim.engines.Engine`."""

    def __init__(self, communicator: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._communicator = communicator
        self.instances: int = communicator.Get_size()
        self.instance: int = communicator.Get_rank()
        self._watched = _Watched(self._processes(), self.instance)

    def _processes(self) -> NDArray[Any]:
        """Which process each instance is."""
        kind = np.dtype([("host", "S256"), ("pid", "i8"), ("started", "i8")])
        own = np.zeros(1, kind)
        pid = os.getpid()
        own[0] = (socket.gethostname().encode()[:256], pid, _started(pid))
        everyone = np.zeros(self.instances, kind)
        self._communicator.Allgather(own.view(np.uint8), everyone.view(np.uint8))
        return everyone

    def exchange(self, sends: Sequence[Buffer], receives: Sequence[Buffer], tag: int) -> Polled:
        post = self._communicator
        requests = [post.Irecv(p, other, tag) for buffer, other in receives for p in _parts(buffer)]
        requests += [post.Isend(p, other, tag) for buffer, other in sends for p in _parts(buffer)]
        return Polled(requests, self._mpi.Request.Testall, self._watched, (sends, receives))

    def all_reduce(self, array: NDArray[Any], op: str) -> NDArray[Any]:
        total = np.empty_like(array, order="C")
        try:
            operator = getattr(self._mpi, _OPERATORS[op])
            given = np.ascontiguousarray(array)
            request = self._communicator.Iallreduce(given, total, operator)
        except (KeyError, ValueError) as error:
            raise TypeError(f"MPI has no all-reduce for op={op!r} of {array.dtype}") from error
        Polled([request], self._mpi.Request.Testall, self._watched, (given, total)).wait()
        return total

    def barrier(self) -> None:
        request = self._communicator.Ibarrier()
        Polled([request], self._mpi.Request.Testall, self._watched, ()).wait()

    def abort(self, message: str) -> NoReturn:
        print(message, file=sys.stderr, flush=True)
        sys.stdout.flush()
        self._communicator.Abort(1)
        os._exit(1)

    def close(self) -> None:
        """Nothing: MPI ends with the process, and a World may be entered again."""


def _parts(buffer: NDArray[Any]) -> list[NDArray[np.uint8]]:
    """The bytes of a buffer, in messages that are not too long."""
    if not isinstance(buffer, np.ndarray):
        raise TypeError(
            f"MPI moves NumPy arrays between instances, got {type(buffer).__name__}; arrays on "
            "GPUs need NCCL"
        )
    flat = buffer.reshape(-1).view(np.uint8)
    return [flat[start : start + LONGEST] for start in range(0, flat.size, LONGEST)]


class Polled:
    """MPI requests, and the buffers that must live as long as they do."""

    def __init__(
        self,
        requests: list[MPI.Request],
        test: Callable[[list[MPI.Request]], bool],
        watched: _Watched,
        buffers: Any,
    ) -> None:
        self._requests = requests
        self._test = test
        self._watched = watched
        self._buffers = buffers

    def wait(self) -> None:
        polls, sleep = 0, SHORTEST_SLEEP
        looked = 0.0
        while not self._test(self._requests):
            polls += 1
            if polls < EAGER_POLLS:
                os.sched_yield()
                continue
            time.sleep(sleep)
            sleep = min(2 * sleep, LONGEST_SLEEP)
            now = time.monotonic()
            if not looked:
                looked = now
            elif now - looked > WATCH_EVERY:
                looked = now
                # What a lost instance sent before its end has still to be taken.
                lost = self._watched.lost()
                if lost is not None and not self._test(self._requests):
                    raise InstanceError(lost, f"instance {lost} is gone: its process has ended")
        self._requests, self._buffers = [], None


class _Watched:
    """The processes of the other instances, as far as they run on this host and can be seen."""

    def __init__(self, processes: NDArray[Any], own: int) -> None:
        self._instances: dict[int, int] = {}  # by file descriptor
        self._poll: select.poll | None = None
        if not hasattr(os, "pidfd_open"):
            return
        for instance, (host, pid, started) in enumerate(processes.tolist()):
            if instance == own or host != processes[own]["host"]:
                continue
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:
                continue
            if started and _started(pid) == started:  # else a process of another container
                self._instances[descriptor] = instance
            else:
                os.close(descriptor)
        self._poll = select.poll()
        for descriptor in self._instances:
            self._poll.register(descriptor, select.POLLIN)

    def lost(self) -> int | None:
        """An instance whose process has ended."""
        ended = self._poll.poll(0) if self._poll is not None else []
        return min((self._instances[descriptor] for descriptor, _ in ended), default=None)


def _started(pid: int) -> int:
    """When a process began, in the kernel's ticks; 0 where nobody tells."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0
