"""What an instance knows of the others: what they announce at their end, and whether their
processes live. Nobody waits for one that will not come."""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mpi4py import MPI

# An announcement: whether it is the end of the program, and the length of the text.
_HEADER = struct.Struct("=BH")
_RECORD_BYTES = 1024
# Seconds from the end of another process to saying so: if a signal ends all, it ends this one too.
_ALL_AT_ONCE = 0.05


class Others:
    """The other instances of a communicator.

    Attributes:
        names: what messages call each instance.
        context: what more there is to say when one is gone; a World sets it.
    """

    def __init__(self, communicator: MPI.Intracomm, turn: threading.Lock) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._communicator = communicator
        self._turn = turn  # of calling MPI
        self._own: int = communicator.Get_rank()
        count: int = communicator.Get_size()
        self.names = [f"instance {i}" for i in range(count)]
        self.context: Callable[[int], str] = lambda lost: ""
        self._announced: dict[int, str] = {}
        self._ended: set[int] = set()  # those that are at the end of their program
        self._said: list[Any] = []  # sends, and their buffers, which nobody waits for
        self._quiet = False
        self._processes = _Processes(communicator)
        communicator.Barrier()  # nobody goes before it is watched

    def watch(self) -> None:
        """Say it when the process of another instance ends, whatever this one is doing."""
        if self._processes.seen:
            threading.Thread(target=self._watch, name="gpusim watch", daemon=True).start()

    def announce(self, text: str, *, ended: bool = False) -> None:
        """Tell all others that this instance takes part no more, and why; waits for nobody."""
        self._quiet |= ended
        said = text.encode()[: _RECORD_BYTES - _HEADER.size]
        record = np.zeros(_RECORD_BYTES, np.uint8)
        raw = _HEADER.pack(ended, len(said)) + said
        record[: len(raw)] = np.frombuffer(raw, np.uint8)
        with self._turn:
            for other in self._all():
                self._said.append((self._communicator.Isend(record, other), record))

    def why_missing(self, instances: Iterable[int]) -> tuple[int, str] | None:
        """One of these instances that comes no more, and the sentence that says why."""
        self._listen()
        for instance in instances:
            if instance in self._announced:
                return instance, self._announced[instance]
        for instance in instances:
            if self._processes.has_ended(instance):
                return instance, self._describe_loss(instance)
        return None

    def all_ended(self, patience: float) -> bool:
        """Whether all others have come to the end of their programs; waits so many seconds."""
        deadline = time.monotonic() + patience
        while True:
            self._listen()
            if all(i in self._ended or self._processes.has_ended(i) for i in self._all()):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)

    def _all(self) -> list[int]:
        return [i for i in range(len(self.names)) if i != self._own]

    def _listen(self) -> None:
        """Take the announcements that have come."""
        status = self._mpi.Status()
        with self._turn:
            while self._communicator.Iprobe(status=status):
                record = np.zeros(_RECORD_BYTES, np.uint8)
                instance = status.Get_source()
                self._communicator.Recv(record, instance)
                ended, length = _HEADER.unpack_from(record.tobytes())
                text = record.tobytes()[_HEADER.size : _HEADER.size + length]
                self._announced.setdefault(instance, text.decode(errors="replace"))
                if ended:
                    self._ended.add(instance)

    def _describe_loss(self, instance: int) -> str:
        pid = self._processes.seen[instance]
        return f"{self.names[instance]} is gone: its process (pid {pid}) has ended"

    def _watch(self) -> None:
        lost = self._processes.wait_for_one()
        time.sleep(_ALL_AT_ONCE)
        if self._quiet:  # the program is at its end
            return
        self._listen()
        if lost not in self._announced:
            text = f"gpusim: {self._describe_loss(lost)}{self.context(lost)}\n"
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())


class _Processes:
    """The processes of the other instances, as far as they run on this host and can be seen.

    Attributes:
        seen: their process ids, by instance.
    """

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self.seen: dict[int, int] = {}
        self._descriptors: dict[int, int] = {}
        own = communicator.Get_rank()
        processes = _everyone(communicator)
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
                self.seen[instance], self._descriptors[instance] = pid, descriptor
            else:
                os.close(descriptor)

    def has_ended(self, instance: int) -> bool:
        descriptor = self._descriptors.get(instance)
        return descriptor is not None and bool(_readable([descriptor], 0))

    def wait_for_one(self) -> int:
        """Return when one has ended; which."""
        (ended, *_) = _readable(list(self._descriptors.values()), None)
        return next(i for i, descriptor in self._descriptors.items() if descriptor == ended)


def _readable(descriptors: list[int], timeout: float | None) -> list[int]:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(timeout)]


def _everyone(communicator: MPI.Intracomm) -> NDArray[Any]:
    """Which process each instance is."""
    own = np.zeros(1, [("host", "S256"), ("pid", "i8"), ("started", "i8")])
    pid = os.getpid()
    own[0] = (socket.gethostname().encode()[:256], pid, _started(pid))
    everyone = np.zeros(communicator.Get_size(), own.dtype)
    communicator.Allgather(own.view(np.uint8), everyone.view(np.uint8))
    return everyone


def _started(pid: int) -> int:
    """When a process began, in the kernel's ticks; 0 where nobody tells."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0
