"""The worker process as the accessor sees it: its start, the elements in its slots, and its end.

Its failure and its death reach the program as errors. Nothing waits for a process that has ended.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import UntypedStorage
from torch.utils.data import Dataset

from gpusim.platforms import signals
from gpusim.poptorch._logging import logger
from gpusim.poptorch.data.transport import Payload, opened, receive_memory
from gpusim.poptorch.data.worker import Failure, Worker
from gpusim.poptorch.enums import SharingStrategy
from gpusim.poptorch.poptorch_core import createPoptorchError

__all__ = ["AsynchronousWorker"]

START_METHODS = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}
FAILED = "An error occurred in the data fetcher"
NOT_STARTED = "AsynchronousDataAccessor worker thread failed to start (Check above for details)"
LOOK = 0.2  # seconds between two checks that the worker lives
GRACE = 2.0  # seconds that a worker has to end by itself
UNGUARDED = (
    "the entry of a program that starts processes has to be guarded by "
    "`if __name__ == '__main__':`, except with SharingStrategy.Fork"
)
HINTS = {
    **{-bus: "; shared memory is probably full (/dev/shm)" for bus in signals("SIGBUS")},
    1: f"; {UNGUARDED}",
}


class AsynchronousWorker:
    """A process that loads elements into `buffer_size` slots of shared memory.

    `pid` is its number.

    **Arguments**:

    - those of AsynchronousDataAccessor, which has checked them.

    **Raises**:

    - poptorch.Error: if the process fails before the first element; the reason is its cause.
    """

    def __init__(
        self,
        buffer_size: int,
        miss_sleep_time_in_ms: float,
        dataset: Any,
        load_indefinitely: bool,
        early_preload: bool,
        sharing_strategy: SharingStrategy,
        rebatched_size: int | None,
    ) -> None:
        strategy = SharingStrategy(sharing_strategy)
        self._epoch, self._iterating, self._ended = 0, False, False
        self._arrived: deque[tuple[int, bytes]] = deque()  # slots, and the structures in them
        self._held: int | None = None
        self._memories: dict[int, UntypedStorage] = {}
        self._failure: Failure | None = None
        self._listening = False
        slots = buffer_size if early_preload else 1
        self._unused = list(range(slots, buffer_size))  # until the first iteration
        logger.debug("AsynchronousDataAccessor parent process: %d", os.getpid())
        loader = Worker(
            payload=Payload(dataset, strategy),
            slots=slots,
            load_indefinitely=load_indefinitely,
            rebatched_size=rebatched_size,
            drop_last=getattr(dataset, "_drop_last", True),
            samples=isinstance(dataset, Dataset),
            seed=seed_of(dataset),
            log_level=logger.level,
        )
        self._start(loader, strategy)
        if (failure := self._until_first()) is not None:
            self.terminate()
            raise explained(createPoptorchError(NOT_STARTED), failure)

    def _start(self, loader: Worker, strategy: SharingStrategy) -> None:
        preload()
        context: Any = get_context(START_METHODS[strategy])
        own, others = context.Pipe()
        inherited = own if strategy is SharingStrategy.Fork else None
        self._process = context.Process(target=loader.run, args=(others, inherited), daemon=False)
        try:
            self._process.start()
        except (EOFError, ConnectionError) as error:  # the fork server has ended
            error.add_note(UNGUARDED)
            raise createPoptorchError(NOT_STARTED) from error
        finally:
            others.close()
        self._connection: Connection = own
        self.pid = int(self._process.pid)
        # before multiprocessing waits for its processes, at the program's end
        self._end = Finalize(self, end, args=(self._process, own), exitpriority=100)

    def _until_first(self) -> Failure | None:
        """Wait for the first element; return what happened instead."""
        while not self.dataIsAvailable() and self._failure is None:
            self.wait()
        return self._failure

    def terminate(self) -> None:
        """End the process, and those that it has started."""
        if self._end.still_active():
            self._end()
        self._fail("the worker has been terminated")

    # ---------------------------------------------------------------- iterating

    def resetIterator(self) -> None:
        """Begin an epoch: the first, or the next, however far the last one has been read.

        **Raises**:

        - AssertionError: if the worker has failed.
        """
        self.releaseElement()
        self.assertNoError()
        free, self._unused = self._unused, []
        if self._iterating:
            free = [slot for slot, _ in self._arrived]
            self._arrived.clear()
            self._epoch += 1
        self._iterating, self._ended = True, False
        self._release(*free)

    @property
    def iterating(self) -> bool:
        """Whether an epoch has begun."""
        return self._iterating

    def dataIsAvailable(self) -> bool:
        """Whether an element has arrived."""
        self._listen()
        return bool(self._arrived)

    def endOfFile(self) -> bool:
        """Whether the epoch has no more elements, or the worker has failed."""
        return not self._arrived and (self._ended or self._failure is not None)

    def acquireElementIfAvailable(self) -> Any:
        """The next element, or None if it has not arrived.

        **Raises**:

        - AssertionError: if the last one has not been released.
        """
        assert self._held is None, (
            "The current element must be released by calling releaseElement() before trying to "
            "acquire a new one"
        )
        if not self.dataIsAvailable():
            return None
        self._held, structure = self._arrived.popleft()
        return opened(structure, self._memories[self._held])

    def releaseElement(self) -> None:
        """Let the worker load another element in place of the current one."""
        if self._held is not None:
            slot, self._held = self._held, None
            self._release(slot)

    def assertNoError(self) -> None:
        """Raise AssertionError if the worker has failed; the worker's exception is its cause."""
        if self._failure is not None:
            raise explained(AssertionError(f"{FAILED}: {self._failure.line}"), self._failure)

    def wait(self) -> None:
        """Wait until the worker sends something or has ended."""
        if self._failure is not None:
            return
        ready = wait([self._connection, self._process.sentinel], LOOK)
        if self._connection not in ready and self._process.exitcode is not None:
            # its last message may have come in between
            if not self._connection.poll():
                self._died()

    # ---------------------------------------------------------------- messages

    def _listen(self) -> None:
        """Read messages until an element arrives, or nothing more comes."""
        while not self._arrived and not self.endOfFile():
            if self._listening:
                self._fail("the program was interrupted while it listened to the worker")
                return
            self._listening = True
            try:
                heard = self._connection.poll()
                if heard:
                    self._take(self._connection.recv())
            except (EOFError, OSError):
                heard = False
                self._died()
            self._listening = False
            if not heard:
                return

    def _take(self, message: Failure | tuple[int, int, bytes | None, int]) -> None:
        if isinstance(message, Failure):
            self._failure = message
            return
        epoch, slot, structure, size = message
        if structure is None:
            self._ended = epoch == self._epoch
            return
        if size:
            self._memories[slot] = receive_memory(self._connection, size)
        if epoch == self._epoch:
            self._arrived.append((slot, structure))
        else:  # loaded before the epoch was left
            self._release(slot)

    def _release(self, *slots: int) -> None:
        if self._failure is not None:
            return
        try:
            self._connection.send((self._epoch, slots))
        except OSError:
            pass  # it has ended: what it has sent before still arrives

    def _died(self) -> None:
        self._process.join(GRACE)
        code = self._process.exitcode
        how = f"was killed by {name(-code)}" if code and code < 0 else f"ended with code {code}"
        self._fail(f"the worker (process {self.pid}) {how}{HINTS.get(code or 0, '')}")
        self._end()  # also ends the processes that it has started

    def _fail(self, line: str) -> None:
        if self._failure is None:
            self._failure = Failure(line)


def seed_of(dataset: Any) -> int:
    """The seed of a DataLoader's options; otherwise drawn, as PyTorch draws its workers' seeds."""
    options = getattr(dataset, "options", None)
    if options is not None and options.exists("random_seed"):
        return int(options.random_seed)
    return int(torch.empty((), dtype=torch.int64).random_().item())


def explained(error: Exception, failure: Failure) -> Exception:
    """The error, with the worker's exception as its cause and its traceback as a note."""
    error.__cause__ = failure.cause()
    error.add_note(f"In the worker process:\n{failure.details or failure.line}")
    return error


def name(number: int) -> str:
    return f"signal {number} ({signal.Signals(number).name})"


def end(process: Any, connection: Connection) -> None:
    """Ask the worker to end. Kill it if it does not, and all that it has started."""
    try:
        connection.send(None)
        process.join(GRACE)
    except OSError:
        pass  # it has ended
    finally:  # also after an interrupt
        kill_group(process.pid)
    if process.exitcode is None:
        process.kill()  # it had no group yet
        process.join()
    connection.close()
    process.close()


def kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # none is left


def preload() -> None:
    """Let the fork server import once what all workers need.

    A server that runs already, and modules that the program has chosen, stay as they are.
    """
    server: Any = forkserver._forkserver  # no public name tells the modules
    if server._preload_modules == ["__main__"]:
        forkserver.set_forkserver_preload(["__main__", Worker.__module__])
