"""The end of replicas that still run: an exception that is posted to their threads."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NEVER_INTERRUPTED = frozenset(
    ("coverage.collector", "gpusim.maps.clock", "gpusim.maps.scheduler", __name__)
)
"""Modules that take a lock in one function and release it in another, as coverage does whenever a
traced function is called. A replica is not ended while it runs their code."""


class ReplicaEnded(BaseException):
    """Raised inside a replica to end it, because another one failed or the user interrupted."""


class ReplicaInterrupted(ReplicaEnded, KeyboardInterrupt):
    """The same after Ctrl-C, which programs expect to see as a KeyboardInterrupt."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        interrupted.add(threading.get_ident())


interrupted: set[int] = set()
"""Threads whose replica has seen a ReplicaInterrupted. It goes on as long as it needs to."""


def end_thread(thread: threading.Thread, kind: type[ReplicaEnded]) -> None:
    """Post a ReplicaEnded to a thread. The interpreter raises it there, between two bytecodes.

    Nothing is posted while the thread runs code of `NEVER_INTERRUPTED`.

    A posted exception must be raised, never taken back with NULL: CPython 3.11 then leaves its
    flag for posted exceptions up, and every traced or profiled function hangs at its entry.
    """
    ident = thread.ident or 0
    post, error = ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.py_object(kind)
    number = ctypes.c_ulong(ident)
    # CPython lets another thread run after a call, but not where a for loop calls its iterator. So
    # the thread is still where it was seen when the exception is posted.
    for stacks in iter(sys._current_frames, None):
        try:
            if stacks[ident].f_globals["__name__"] in NEVER_INTERRUPTED:
                return
        except KeyError:
            pass
        post(number, error)
        return


@contextmanager
def quiet_ends(*kinds: type[BaseException]) -> Iterator[None]:
    """A block in which a ReplicaEnded that meets a destructor, which ignores it, is not shown.

    Callbacks of weak references and of the garbage collector ignore it too. `kinds` are more
    exceptions that are not shown.
    """
    before = sys.unraisablehook

    def show(ignored: Any) -> None:
        if issubclass(ignored.exc_type, ReplicaEnded):
            interrupted.discard(threading.get_ident())  # whose replica has not seen it
        elif not issubclass(ignored.exc_type, kinds):
            before(ignored)

    sys.unraisablehook = show
    try:
        yield
    finally:
        if sys.unraisablehook is show:  # else another thread's is in front of it
            sys.unraisablehook = before
