"""The other instances: what they announce at their end, and whether their processes live."""

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

from ..reaper import start_time

if TYPE_CHECKING:
    from mpi4py import MPI

# An announcement: whether it is the end of the program, and the length of the text.
_HEADER = struct.Struct("=BH")
_RECORD_BYTES = 1024
# Seconds from the end of another process to the report: a signal to all ends this process first.
# mpirun ends those that are left 0.25 s after one was killed, and what they say later is lost.
_REPORT_DELAY = 0.05
# Seconds that the report waits for the World to be made.
_NAMING = 10.0


class Peers:
    """The other instances of a communicator.

    **Attributes**:

    - `names`: the name of each instance in messages.
    - `context`: what a message about a lost instance adds; a World sets it.
    - `named`: set when a World has set both.
    """

    def __init__(self, communicator: MPI.Intracomm, lock: threading.Lock) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._communicator = communicator
        self._lock = lock  # of MPI calls
        self._instance: int = communicator.Get_rank()
        count: int = communicator.Get_size()
        self.names = [f"instance {i}" for i in range(count)]
        self.context: Callable[[int], str] = lambda lost: ""
        self.named = threading.Event()
        self._announced: dict[int, str] = {}
        self._ended: set[int] = set()  # those at the end of their program
        self._sends: list[Any] = []  # requests and buffers, kept until the process ends
        self._ending = False
        self._processes = _LocalProcesses(communicator)
        communicator.Barrier()  # no instance goes on before the others watch it

    def watch(self) -> None:
        """Report when the process of another instance ends, whatever this one is doing."""
        if self._processes.pids:
            threading.Thread(target=self._watch, name="gpusim watch", daemon=True).start()

    def announce(self, text: str, *, ended: bool = False) -> None:
        """Tell all others that this instance takes no further part, and why, without waiting."""
        self._ending |= ended
        content = text.encode()[: _RECORD_BYTES - _HEADER.size]
        record = np.zeros(_RECORD_BYTES, np.uint8)
        raw = _HEADER.pack(ended, len(content)) + content
        record[: len(raw)] = np.frombuffer(raw, np.uint8)
        with self._lock:
            for other in self._all():
                self._sends.append((self._communicator.Isend(record, other), record))

    def why_missing(self, instances: Iterable[int]) -> tuple[int, str] | None:
        """One of these instances that takes no further part, and a sentence that says why."""
        self._receive()
        for instance in instances:
            if instance in self._announced:
                return instance, self._announced[instance]
        for instance in instances:
            if self._processes.has_ended(instance):
                return instance, self._describe_loss(instance)
        return None

    def all_ended(self, patience: float) -> bool:
        """Whether all others reach the end of their programs within `patience` seconds."""
        deadline = time.monotonic() + patience
        while True:
            self._receive()
            if all(i in self._ended or self._processes.has_ended(i) for i in self._all()):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)

    def _all(self) -> list[int]:
        return [i for i in range(len(self.names)) if i != self._instance]

    def _receive(self) -> None:
        """Take the announcements that have arrived."""
        status = self._mpi.Status()
        with self._lock:
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
        pid = self._processes.pids[instance]
        return f"{self.names[instance]} is gone: its process (pid {pid}) has ended"

    def _watch(self) -> None:
        lost = self._processes.wait_for_one()
        # On a busy machine this instance may be late to make its World, which knows the replicas.
        # If that cannot be made, its exchange raises by itself.
        self.named.wait(_NAMING)
        time.sleep(_REPORT_DELAY)
        if self._ending:
            return
        self._receive()
        if lost not in self._announced:
            text = f"gpusim: {self._describe_loss(lost)}{self.context(lost)}\n"
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())


class _LocalProcesses:
    """The processes of the other instances that run on this host and are visible.

    **Attributes**:

    - `pids`: their process ids, by instance.
    """

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self.pids: dict[int, int] = {}
        self._descriptors: dict[int, int] = {}
        local = communicator.Get_rank()
        processes = _all_processes(communicator)
        if not hasattr(os, "pidfd_open"):
            return
        for instance, (host, pid, started) in enumerate(processes.tolist()):
            if instance == local or host != processes[local]["host"]:
                continue
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:
                continue
            if started and start_ticks(pid) == started:  # else a process of another container
                self.pids[instance], self._descriptors[instance] = pid, descriptor
            else:
                os.close(descriptor)

    def has_ended(self, instance: int) -> bool:
        descriptor = self._descriptors.get(instance)
        return descriptor is not None and bool(_readable([descriptor], 0))

    def wait_for_one(self) -> int:
        """Return when one has ended, and which."""
        (ended, *_) = _readable(list(self._descriptors.values()), None)
        return next(i for i, descriptor in self._descriptors.items() if descriptor == ended)


def _readable(descriptors: list[int], timeout: float | None) -> list[int]:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(timeout)]


def _all_processes(communicator: MPI.Intracomm) -> NDArray[Any]:
    """The host, the process id and the start of each instance."""
    local = np.zeros(1, [("host", "S256"), ("pid", "i8"), ("started", "i8")])
    pid = os.getpid()
    local[0] = (socket.gethostname().encode()[:256], pid, start_ticks(pid))
    processes = np.zeros(communicator.Get_size(), local.dtype)
    communicator.Allgather(local.view(np.uint8), processes.view(np.uint8))
    return processes


def start_ticks(pid: int) -> int:
    """The start of a process in the kernel's ticks; 0 if it is unknown."""
    return int(start_time(pid) or 0)
