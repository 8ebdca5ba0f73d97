"""The engine between processes: mpi4py's buffers, sent and received without waiting.
Waiting is polling, so that Ctrl-C comes through and an instance that is gone is noticed."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

import fallback

from ...errors import InstanceError
from ...libraries import on_device
from ..reaper import watching_start
from . import Buffer, Pending, interruption
from .ending import Ending
from .others import Others

if TYPE_CHECKING:
    from mpi4py import MPI

    from .nccl import NcclEngine

# The largest message: MPI counts in C ints.
LONGEST = 1 << 30
# Seconds before a waiting instance goes to sleep between its polls, and for how long. Messages only
# go on while both ends poll: asleep, it keeps the other one waiting. Others may need its core, so
# it lets them go first from the beginning.
EAGER = 0.02
SHORTEST_SLEEP, LONGEST_SLEEP = 2e-5, 1e-3
# Seconds between looks at whether the others still come, and for which what they sent before may
# be on its way.
LOOK_EVERY, STILL_COMING = 0.05, 0.3
# Seconds in which the others may say what they were doing, before a failing instance ends them.
LAST_WORDS = 1.0
# Seconds in which the one that has failed ends first, as its exit code is that of all.
AFTER_YOU = 0.3

# How instance 0 tells the others which communicator of NCCL is theirs.
IDENTITY_BYTES, IDENTITY_TAG = 128, (1 << 22) - 3

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

    From here on an error that nobody catches ends all instances, not this one alone.

    Raises:
        ImportError: without mpi4py; names what to install.
    """
    global _engine
    if _engine is None:
        with watching_start():
            try:
                from mpi4py import MPI
            except ImportError as error:
                raise ImportError(
                    "several instances need mpi4py and an MPI library: pip install 'gpusim[mpi]'"
                ) from error
            _engine = MpiEngine(MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup())
    return _engine


class MpiEngine:
    """All processes of a communicator; see `gpusim.runtime.engines.Engine`.

    Attributes:
        others: what is known of the other instances.
        broken: True once a wait was left by an error; what comes then belongs to nobody knows what.
    """

    def __init__(self, communicator: MPI.Intracomm, announcements: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._communicator = communicator
        self.instances: int = communicator.Get_size()
        self.instance: int = communicator.Get_rank()
        self.broken = False
        self._turn = threading.Lock()  # of calling MPI: what a library says of threads is not all
        self._under_way: set[Polled] = set()
        self._slow: set[Polled] = set()  # those that somebody has waited for for long
        self.others = Others(announcements, self._turn)
        self._ending = Ending(self, self.others.names[self.instance])
        self.others.watch()
        self._gpus: NcclEngine | None = None

    def prepare(self, array: Any) -> None:
        if self._gpus is not None or not on_device(array):
            return
        from .nccl import NcclEngine, unique_id

        identity = np.zeros(IDENTITY_BYTES, np.uint8)
        if self.instance == 0:
            identity[:] = np.frombuffer(unique_id(), np.uint8)
            others = range(1, self.instances)
            self.exchange([(identity, other) for other in others], [], IDENTITY_TAG).wait()
        else:
            self.exchange([], [(identity, 0)], IDENTITY_TAG).wait()
        gpu = int(array.device.id)
        self._gpus = NcclEngine(self.instances, self.instance, identity.tobytes(), gpu)

    def exchange(self, sends: Sequence[Buffer], receives: Sequence[Buffer], tag: int) -> Pending:
        if self._gpus is not None and any(on_device(array) for array, _ in (*sends, *receives)):
            return self._gpus.exchange(sends, receives, tag)
        post = self._communicator
        ins = [(part, other) for buffer, other in receives for part in _parts(buffer)]
        outs = [(part, other) for buffer, other in sends for part in _parts(buffer)]
        with self._turn:
            requests = [post.Irecv(part, other, tag) for part, other in ins]
            requests += [post.Isend(part, other, tag) for part, other in outs]
        pending = Polled(self, requests, [other for _, other in ins + outs], (sends, receives))
        self._under_way.add(pending)
        return pending

    def all_reduce(self, array: NDArray[Any], op: str) -> NDArray[Any]:
        if self._gpus is not None and on_device(array):
            summed: NDArray[Any] = self._gpus.all_reduce(array, op)
            return summed
        total = fallback.empty(array.shape, array.dtype)
        try:
            operator = getattr(self._mpi, _OPERATORS[op])
            # Not Iallreduce, whose algorithms are others and slower: the instances have agreed on
            # this call, so that none of them is waited for here.
            self._communicator.Allreduce(np.ascontiguousarray(array), total, operator)
        except (KeyError, ValueError) as error:
            raise TypeError(f"MPI has no all-reduce for op={op!r} of {array.dtype}") from error
        return total

    def barrier(self) -> None:
        others = [i for i in range(self.instances) if i != self.instance]
        with self._turn:
            requests = [self._communicator.Ibarrier()]
        Polled(self, requests, others, ()).wait()

    def name_instances(self, names: Sequence[str], context: Callable[[int], str]) -> None:
        """How messages are to call the instances, and what more to say when one is gone."""
        self.others.names[:] = names
        self.others.context = context
        self._ending.name = names[self.instance]

    def fail(self, error: BaseException) -> None:
        """Let the others know that this instance takes part no more; does not wait for them."""
        self.broken = True
        self._ending.fail(error)

    def overhear(self, instance: int, tags: Callable[[int], bool]) -> NDArray[np.uint8] | None:
        """Take the first message of an instance for which nobody here waits, if its tag is one of
        these."""
        status = self._mpi.Status()
        with self._turn:
            if not self._communicator.Iprobe(instance, status=status):
                return None
            if not tags(status.Get_tag()):
                return None
            message = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
            self._communicator.Recv(message, instance, status.Get_tag())
        return message

    def announce(self, text: str, *, ended: bool = False) -> None:
        self.others.announce(text, ended=ended)

    def abort(self, message: str, code: int = 1) -> NoReturn:
        self._ending.note()
        sys.stdout.flush()
        print(message, file=sys.stderr, flush=True)
        self.announce(message.removeprefix("gpusim: "), ended=True)
        self.others.all_ended(LAST_WORDS)
        if self._ending.by_another:
            time.sleep(AFTER_YOU)
        if "OMPI_COMM_WORLD_SIZE" in os.environ:
            os._exit(code)  # mpirun ends the others, with fewer words than after Abort
        self._communicator.Abort(code)
        os._exit(code)

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
        engine: MpiEngine,
        requests: list[MPI.Request],
        instances: list[int],
        buffers: Any,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._instances = instances  # of each request
        self._buffers = buffers

    def wait(self) -> None:
        try:
            self._wait()
        except BaseException:
            self._engine.broken = True  # and keeps the buffers, which MPI may still write into
            raise
        finally:
            self._engine._slow.discard(self)
        self._engine._under_way.discard(self)
        self._requests, self._buffers = [], None

    def _wait(self) -> None:
        sleep, eager = SHORTEST_SLEEP, time.monotonic() + EAGER
        looked, doubted = 0.0, 0.0
        interrupted = interruption.get()
        while not self._done():
            if time.monotonic() < eager:
                os.sched_yield()
                continue
            self._engine._slow.add(self)
            time.sleep(sleep)
            # Many threads that poll would take the time of those that compute.
            sleep = min(2 * sleep, LONGEST_SLEEP * max(1, len(self._engine._slow)))
            if interrupted is not None:
                interrupted()
            now = time.monotonic()
            if now - looked < LOOK_EVERY:
                continue
            looked = now
            missing = self._engine.others.why_missing(self.awaited())
            if missing is None:
                doubted = 0.0
            elif not doubted:
                doubted = now
            elif now - doubted > STILL_COMING and not self._done():
                raise InstanceError(*missing)

    def _done(self) -> bool:
        with self._engine._turn:
            return self._engine._mpi.Request.Testall(self._requests)

    def awaited(self) -> list[int]:
        """The instances on which this depends still."""
        with self._engine._turn:
            over = [request.Get_status() for request in self._requests]
        if len(over) < len(self._instances):  # of all instances together
            return self._instances
        return sorted({i for i, done in zip(self._instances, over, strict=True) if not done})
