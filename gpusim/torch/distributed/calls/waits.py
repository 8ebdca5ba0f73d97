"""How a rank waits: without its turn, which it takes again together with the process's globals."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ....errors import DeadlockError
from ....maps.clock import come_back, outside, sleep
from ....maps.completion import Completion, give_way
from ....maps.ending import interrupted
from ..own.draws import is_forking
from ..own.threads import own_rank

if TYPE_CHECKING:
    from ....maps.scheduler import ReplicaThread
    from ..runners.threads import Launch
    from .exchange import RankWork

__all__ = ["Waits", "note_stall", "rank_that_waits", "stall_of"]

STALLED = "no rank can go on"
"""How each description of a stall begins, in the note of an exception too."""


POLLS = 100
"""How often a rank may ask the same of the file system before others run first."""

QUESTIONS = 1000
"""How many different ones are counted."""


def note_stall(error: BaseException, stall: str | None) -> BaseException:
    """Add to a time-out's exception who waited for what."""
    if stall:
        error.add_note(stall)
    return error


def stall_of(error: BaseException) -> str:
    """The note that `note_stall` has added; empty if there is none."""
    notes = getattr(error, "__notes__", ())
    return next((each for each in notes if each.startswith(STALLED)), "")


class Waits:
    """The ways in which a rank waits."""

    launch: Launch
    index: int
    waits_for: str
    #: The call of which it has asked last whether it is complete.
    asks_for: str = ""
    #: The last question to the store, and how often others were asked since the rank waited.
    store_question: tuple[Any, ...] | None = None
    asked: dict[Any, int] | None = None

    def thread(self) -> ReplicaThread:
        raise NotImplementedError

    def check_thread(self, what: str) -> None:
        raise NotImplementedError

    def _take_globals(self) -> None:
        """Exchange the process's globals, with the turn."""
        rank: Any = self
        self.launch.turn_of(rank)

    def call_site(self) -> str:
        raise NotImplementedError

    def is_inside(self) -> bool:
        """Whether the calling thread, the rank's own, runs gpusim's code, which waits itself.

        Also whether it cleans up after an interrupt: its sleeps are Python's own then.
        """
        thread = self.thread()
        return thread.inside or (thread.ended and threading.get_ident() in interrupted)

    def wait_for(self, completion: Completion, what: str, limit: float | None = None) -> bool:
        """Wait without the turn, and take it again.

        **Returns**: False if the limit, in seconds, has expired before.
        """
        self.check_thread("wait")
        self.waits_for, self.asked = what, None
        thread = self.thread()
        if thread.outside or thread.away:
            with self._not_outside():
                done = completion.wait(thread, limit)
        else:
            done = completion.wait(thread, limit)
        self.waits_for = ""
        self._take_globals()
        return done

    def wait_for_work(self, work: RankWork, what: str, limit: float | None, own: bool) -> None:
        """Wait for a call. **Raises**: RuntimeError if the limit has expired; see `RankWork`."""
        if not self.wait_for(work._pending.done, what, limit):
            assert limit is not None
            work.expire(limit, own, self.thread().expired)

    def give_way(self, asks: str = "") -> bool:
        """Let the ranks that can run do so first.

        **Arguments**: `asks` is the call of which the rank asks whether it is complete.

        **Returns**: False if it asks in vain; see `gpusim.maps.completion.give_way`.
        """
        self.check_thread("is_completed")
        self.asks_for = asks
        with self._not_outside():
            goes_on = give_way(self.thread(), bool(asks))
        self._take_globals()
        return goes_on

    def fail_waiting(self, what: str) -> None:
        """End all ranks, as this one asks in vain whether a call is complete."""
        with self.launch.scheduler.lock:
            self.waits_for = what
            self.launch.call.abort(DeadlockError(self.launch.describe_stall()))
        self.thread().check_ended()

    def sleep(self, seconds: float) -> None:
        """Sleep without the turn, at least as long."""
        if not seconds:
            self.give_way()
            return
        self.waits_for = f"time.sleep({seconds:.6g}) at {self.call_site()}"
        with self._not_outside():
            sleep(self.thread(), seconds)
        self.waits_for = ""
        self._take_globals()

    def asks(self, *question: Any) -> bool:
        """Note a question to the file system; whether it was asked so often that others may run."""
        if self.asked is None or len(self.asked) > QUESTIONS:
            self.asked = {}
        count = self.asked.get(question, 0) + 1
        self.asked[question] = count
        if count > POLLS:
            self.asked = {}
        return count > POLLS

    @contextmanager
    def outside(self, what: str) -> Iterator[None]:
        """A block in which the rank may wait for others outside of torch.distributed.

        It may lose its turn there, and must not use what changes hands with it.
        """
        before, self.waits_for = self.waits_for, what
        try:
            with outside(self.thread()):
                yield
        finally:
            self.waits_for = before
            self._take_globals()

    @contextmanager
    def _not_outside(self) -> Iterator[None]:
        """A block in which the rank waits as ranks do, also inside of a block of `outside`."""
        thread = self.thread()
        was, thread.outside = thread.outside, False
        if thread.away:
            come_back(thread)
        try:
            yield
        finally:
            thread.outside = was


def rank_that_waits() -> Any:
    """The rank whose own thread this is, while it runs its program; else None.

    It is None in processes that a rank has started, too, and while the rank imports a module or is
    about to fork: it holds the module's lock then, or that of all forks. Another rank that imports
    the module, or forks, waits for the lock with the turn, and would wait for ever.
    """
    rank = own_rank()
    if rank is None or rank.launch.pid != os.getpid() or rank.is_inside():
        return None
    if _imports() or is_forking():
        return None
    return rank


def _imports() -> bool:
    """Whether the calling thread holds the lock of a module, which it imports."""
    locks = list(_module_locks.values())  # of imports that run now: none as a rule
    if not locks:
        return False
    me = threading.get_ident()
    return any(getattr(lock(), "owner", None) == me for lock in locks)


_bootstrap: Any = importlib._bootstrap
_module_locks: dict[str, Any] = getattr(_bootstrap, "_module_locks", {})
