"""The worker process as the accessor sees it: started, asked, listened to, and ended.
What it has to say about its end is said, and nothing waits for one that is no more."""

from __future__ import annotations

import os
import pickle
import signal
from collections import deque
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gpusim.poptorch._logging import logger
from gpusim.poptorch.data import worker
from gpusim.poptorch.data.parcel import Parcel, context_of
from gpusim.poptorch.data.protocol import End, Failure, Filled, Iterate, Release, Settings, Stop
from gpusim.poptorch.data.ring import read, received
from gpusim.poptorch.enums import SharingStrategy
from gpusim.poptorch.poptorch_core import createPoptorchError

__all__ = ["AsynchronousWorker"]

FAILED = "An error occurred in the data fetcher"
NOT_STARTED = "AsynchronousDataAccessor worker thread failed to start (Check above for details)"
LOOK = 0.2  # seconds between two looks whether the worker lives, where nothing else tells
GRACE = 2.0  # seconds that a worker has to end by itself
UNGUARDED = (
    "the entry of a program that starts processes has to be guarded by "
    "`if __name__ == '__main__':`, except with SharingStrategy.Fork"
)
HINTS = {
    -signal.SIGBUS: "; shared memory is probably full (/dev/shm)",
    1: f"; {UNGUARDED}",
}


class AsynchronousWorker:
    """A process that loads elements into a ring of shared memory.

    `pid` is its number.

    **Arguments**

    - as AsynchronousDataAccessor's, which has checked them.

    poptorch.Error, with the reason as its cause, if it does not get as far as the first element.
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
        self._arrived: deque[tuple[int, bytes]] = deque()  # slots, and the outlines in them
        self._held: int | None = None
        self._memories: dict[int, Tensor] = {}
        self._outline = b""
        self._failure: Failure | None = None
        self._listening = False
        logger.debug("AsynchronousDataAccessor parent process: %d", os.getpid())
        settings = Settings(
            buffer_size=buffer_size,
            load_indefinitely=load_indefinitely,
            early_preload=early_preload,
            rebatched_size=rebatched_size,
            drop_last=getattr(dataset, "_drop_last", True),
            samples=isinstance(dataset, Dataset),
            seed=seed_of(dataset),
            log_level=logger.level,
        )
        self._start(Parcel(dataset, strategy), settings, strategy)
        if (failure := self._until_first()) is not None:
            self.terminate()
            raise reported(createPoptorchError(NOT_STARTED), failure)

    def _start(self, parcel: Parcel, settings: Settings, strategy: SharingStrategy) -> None:
        preload()
        context = context_of(strategy)
        own, others = context.Pipe()
        forked = own if strategy is SharingStrategy.Fork else None
        self._process = context.Process(
            target=worker.run, args=(others, forked, parcel, settings), daemon=False
        )
        try:
            self._process.start()
        except (EOFError, ConnectionError) as error:  # of the fork server, which has ended
            own.close()
            error.add_note(UNGUARDED)
            raise createPoptorchError(NOT_STARTED) from error
        except BaseException:
            own.close()
            raise
        finally:
            parcel.close()
            others.close()
        self._connection: Connection = own
        self.pid = int(self._process.pid)
        # before multiprocessing waits for its processes, at the program's end
        self._end = Finalize(self, end, args=(self._process, own), exitpriority=100)

    def terminate(self) -> None:
        """End the process, and those that it has started; its memory goes with its tensors."""
        if self._end.still_active():
            self._end()
        if self._failure is None:
            self._failure = Failure("the worker has been terminated", "", None)

    # ---------------------------------------------------------------- iterating

    def resetIterator(self) -> None:
        """Begin an epoch: the first, or the next, however far the last one has been read.

        AssertionError if the worker has failed.
        """
        self.releaseElement()
        self.assertNoError()
        if self._iterating:
            while self._arrived:
                self._release(self._arrived.popleft()[0])
            self._epoch += 1
        self._iterating, self._ended = True, False
        self._send(Iterate(self._epoch))

    def _until_first(self) -> Failure | None:
        """Wait for the first element; what happened if there is none."""
        while not self.dataIsAvailable() and self._failure is None:
            self.wait()
        return self._failure

    @property
    def iterating(self) -> bool:
        """Whether an epoch has been begun."""
        return self._iterating

    def dataIsAvailable(self) -> bool:
        """Whether an element is there."""
        self._listen()
        return bool(self._arrived)

    def endOfFile(self) -> bool:
        """Whether the epoch has no more elements, or the worker has failed."""
        return not self._arrived and (self._ended or self._failure is not None)

    def acquireElementIfAvailable(self) -> Any:
        """The next element, or None if it is not there yet. Its tensors lie in the ring.

        AssertionError if the last one has not been released.
        """
        assert self._held is None, (
            "The current element must be released by calling releaseElement() before trying to "
            "acquire a new one"
        )
        if not self.dataIsAvailable():
            return None
        self._held, outline = self._arrived[0]
        self._arrived.popleft()
        return read(self._memories[self._held], pickle.loads(outline))

    def releaseElement(self) -> None:
        """The current element is no longer needed: the worker may write where it lies."""
        if self._held is not None:
            slot, self._held = self._held, None
            self._release(slot)

    def assertNoError(self) -> None:
        """AssertionError if the worker has failed, with what it said and its exception as cause."""
        if self._failure is not None:
            raise reported(AssertionError(f"{FAILED}: {self._failure.line}"), self._failure)

    def wait(self) -> None:
        """Until the worker says something, or is no more."""
        if self._failure is not None:
            return
        ready = wait([self._connection, self._process.sentinel], LOOK)
        if self._connection not in ready and self._process.exitcode is not None:
            # what it said last may have come in between
            if not self._connection.poll():
                self._died()

    # ---------------------------------------------------------------- messages

    def _listen(self) -> None:
        """Read messages until an element is there, or nothing more comes."""
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

    def _take(self, message: Filled | End | Failure) -> None:
        if isinstance(message, Failure):
            self._failure = message
        elif isinstance(message, End):
            self._ended = message.epoch == self._epoch
        else:
            if message.outline is not None:
                self._outline = message.outline
            if message.memory is not None:
                self._memories[message.slot] = received(self._connection, message.memory)
            if message.epoch == self._epoch:
                self._arrived.append((message.slot, self._outline))
            else:  # loaded before the epoch was left
                self._release(message.slot)

    def _release(self, slot: int) -> None:
        self._send(Release(slot))

    def _send(self, command: Iterate | Release) -> None:
        if self._failure is not None:
            return
        try:
            self._connection.send(command)
        except OSError:
            pass  # it is no more, which what it has sent so far ends with

    def _died(self) -> None:
        self._process.join(GRACE)
        code = self._process.exitcode
        how = f"was killed by {name(-code)}" if code and code < 0 else f"ended with code {code}"
        self._fail(f"the worker (process {self.pid}) {how}{HINTS.get(code or 0, '')}")
        self._end()  # of what it has started, too

    def _fail(self, line: str) -> None:
        if self._failure is None:
            self._failure = Failure(line, "", None)


def seed_of(dataset: Any) -> int:
    """That of a DataLoader's options; otherwise drawn, as PyTorch draws its workers'."""
    options = getattr(dataset, "options", None)
    if options is not None and options.exists("random_seed"):
        return int(options.random_seed)
    return int(torch.empty((), dtype=torch.int64).random_().item())


def reported(error: Exception, failure: Failure) -> Exception:
    """An error that tells what happened in the worker."""
    error.__cause__ = failure.cause()
    error.add_note(f"In the worker process:\n{failure.details or failure.line}")
    return error


def name(number: int) -> str:
    return f"signal {number} ({signal.Signals(number).name})"


def end(process: Any, connection: Connection) -> None:
    """Ask the worker to end, and end it if it does not, with all that it has started."""
    try:
        connection.send(Stop())
        process.join(GRACE)
    except OSError:
        pass  # it is no more
    finally:  # also if somebody is impatient, and interrupts
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
    """Let the fork server import what workers need, once for all of them.

    Without effect if it runs already, or if the program has said what it is to import.
    """
    server: Any = forkserver._forkserver  # there is no other way to ask
    if server._preload_modules == ["__main__"]:
        forkserver.set_forkserver_preload(["__main__", worker.__name__])
