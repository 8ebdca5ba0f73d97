"""The engine between processes: mpi4py's buffers, sent and received asynchronously.

Waiting polls, so that Ctrl-C works and an instance that is gone is noticed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from gpusim import fallback

from ...errors import InstanceError
from ...libraries import on_device
from ...optional import load
from ..environment import Launch
from ..reaper import watching_start
from . import Buffer, Pending, interruption
from .ending import ExitHandler
from .peers import Peers

if TYPE_CHECKING:
    from mpi4py import MPI

    from .nccl import NcclEngine

# Bytes of the largest message: MPI counts in C ints.
MAX_MESSAGE = 1 << 30
# Seconds of polling without sleep, then the sleep between polls. Messages make progress only while
# both ends poll, so a sleeping instance delays the other one. Polling yields the core to others.
EAGER = 0.02
MIN_SLEEP, MAX_SLEEP = 2e-5, 1e-3
# Seconds between checks of the peers, and for which messages of a lost peer may still arrive.
CHECK_EVERY, ARRIVAL_DELAY = 0.05, 0.3
# Seconds in which the others may report what they were doing, before a failing instance ends them.
REPORT_PATIENCE = 1.0
# Seconds in which the instance that has failed ends first: its exit code becomes that of the run.
FAILED_FIRST = 0.3

# The message in which instance 0 sends the others the identity of their NCCL communicator.
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


def connect(launch: Launch | None = None) -> MpiEngine:
    """The engine of this process and all others of its mpirun; made on first use.

    From here on an uncaught error ends all instances.

    **Arguments**

    - `launch`: the launcher's variables, which MPI must agree with.

    **Raises**: ImportError, which says what to install, without mpi4py; ValueError if MPI does not
    agree with `launch`.
    """
    global _engine
    if _engine is None:
        with watching_start():
            MPI = load("several instances need", "mpi4py.MPI")
            _engine = MpiEngine(MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup())
    rank_and_size = _engine.instance, _engine.instances
    if launch is not None and rank_and_size != (launch.instance, launch.instances):
        raise ValueError(
            f"{launch.launcher} has started instance {launch.instance} of {launch.instances}, "
            f"but MPI counts it as {_engine.instance} of {_engine.instances}: mpi4py belongs to "
            "another MPI library than the launcher"
        )
    return _engine


class MpiEngine:
    """All processes of a communicator; see `gpusim.runtime.engines.Engine`.

    **Attributes**:

    - `peers`: the other instances.
    - `broken`: True once an error has ended a wait: its messages may arrive in later exchanges.
    """

    def __init__(self, communicator: MPI.Intracomm, announcements: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._communicator = communicator
        self.instances: int = communicator.Get_size()
        self.instance: int = communicator.Get_rank()
        self.broken = False
        self._lock = threading.Lock()  # of MPI calls: MPI libraries have bugs with threads
        self._pending: set[MpiExchange] = set()
        self._slow: set[MpiExchange] = set()  # those whose wait has begun to sleep
        self.peers = Peers(announcements, self._lock)
        self._exit = ExitHandler(self, self.peers.names[self.instance])
        self.peers.watch()
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
        with self._lock:
            requests = [post.Irecv(part, other, tag) for part, other in ins]
            requests += [post.Isend(part, other, tag) for part, other in outs]
        pending = MpiExchange(self, requests, [other for _, other in ins + outs], (sends, receives))
        self._pending.add(pending)
        return pending

    def all_reduce(self, array: NDArray[Any], op: str) -> NDArray[Any]:
        if self._gpus is not None and on_device(array):
            summed: NDArray[Any] = self._gpus.all_reduce(array, op)
            return summed
        total = fallback.empty(array.shape, array.dtype)
        try:
            operator = getattr(self._mpi, _OPERATORS[op])
            # Not Iallreduce, which has other and slower algorithms. The instances have agreed on
            # this call, so none of them is missing.
            self._communicator.Allreduce(np.ascontiguousarray(array), total, operator)
        except (KeyError, ValueError) as error:
            raise TypeError(f"MPI has no all-reduce for op={op!r} of {array.dtype}") from error
        return total

    def barrier(self) -> None:
        others = [i for i in range(self.instances) if i != self.instance]
        with self._lock:
            requests = [self._communicator.Ibarrier()]
        MpiExchange(self, requests, others, ()).wait()

    def name_instances(self, names: Sequence[str], context: Callable[[int], str]) -> None:
        """Set the names of the instances in messages, and what a message about a lost one adds."""
        self.peers.names[:] = names
        self.peers.context = context
        self._exit.name = names[self.instance]
        self.peers.named.set()

    def fail(self, error: BaseException) -> None:
        """Tell the other instances that this one takes no further part; does not wait for them."""
        self.broken = True
        self._exit.fail(error)

    def receive_unexpected(
        self, instance: int, tags: Callable[[int], bool]
    ) -> NDArray[np.uint8] | None:
        """Take an instance's first message that no exchange awaits, if `tags` accepts its tag."""
        status = self._mpi.Status()
        with self._lock:
            if not self._communicator.Iprobe(instance, status=status):
                return None
            if not tags(status.Get_tag()):
                return None
            message = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
            self._communicator.Recv(message, instance, status.Get_tag())
        return message

    def announce(self, text: str, *, ended: bool = False) -> None:
        self.peers.announce(text, ended=ended)

    def abort(self, message: str, code: int = 1) -> NoReturn:
        self._exit.note()
        sys.stdout.flush()
        print(message, file=sys.stderr, flush=True)
        self.announce(message.removeprefix("gpusim: "), ended=True)
        self.peers.all_ended(REPORT_PATIENCE)
        if self._exit.caused_by_another:
            time.sleep(FAILED_FIRST)
        if "OMPI_COMM_WORLD_SIZE" in os.environ:
            os._exit(code)  # mpirun ends the others; its message is shorter than after Abort
        self._communicator.Abort(code)
        os._exit(code)

    def close(self) -> None:
        """Nothing: MPI ends with the process, and a World may be entered again."""


def _parts(buffer: NDArray[Any]) -> list[NDArray[np.uint8]]:
    """The bytes of a buffer, in messages of at most MAX_MESSAGE."""
    if not isinstance(buffer, np.ndarray):
        raise TypeError(
            f"MPI moves NumPy arrays between instances, got {type(buffer).__name__}; arrays on "
            "GPUs need NCCL"
        )
    flat = buffer.reshape(-1).view(np.uint8)
    return [flat[start : start + MAX_MESSAGE] for start in range(0, flat.size, MAX_MESSAGE)]


class MpiExchange:
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
            self._engine.broken = True  # the buffers are kept: MPI may still write into them
            raise
        finally:
            self._engine._slow.discard(self)
        self._engine._pending.discard(self)
        self._requests, self._buffers = [], None

    def _wait(self) -> None:
        sleep, eager = MIN_SLEEP, time.monotonic() + EAGER
        checked, missing_since = 0.0, 0.0
        interrupted = interruption.get()
        while not self._done():
            if time.monotonic() < eager:
                os.sched_yield()
                continue
            self._engine._slow.add(self)
            time.sleep(sleep)
            # Many polling threads would slow down those that compute.
            sleep = min(2 * sleep, MAX_SLEEP * max(1, len(self._engine._slow)))
            if interrupted is not None:
                interrupted()
            now = time.monotonic()
            if now - checked < CHECK_EVERY:
                continue
            checked = now
            missing = self._engine.peers.why_missing(self.awaited())
            if missing is None:
                missing_since = 0.0
            elif not missing_since:
                missing_since = now
            elif now - missing_since > ARRIVAL_DELAY and not self._done():
                raise InstanceError(*missing)

    def _done(self) -> bool:
        with self._engine._lock:
            return self._engine._mpi.Request.Testall(self._requests)

    def awaited(self) -> list[int]:
        """The instances that have not yet done their part."""
        with self._engine._lock:
            done = [request.Get_status() for request in self._requests]
        if len(done) < len(self._instances):  # one request of all instances, a barrier
            return self._instances
        return sorted({i for i, over in zip(self._instances, done, strict=True) if not over})
