"""The threads on which devices' calls end.

XLA runs the rest of a device's program on the thread that completes its future, and may wait there
until other devices come. So each future may need a thread of its own; most do not.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from gpusim.fallback import threads

Function = Callable[[], None]

#: Seconds in which no function is begun, after which the threads of a batch are taken to wait.
PATIENCE = 0.001

#: How many calls of a site have a thread for each device once some had to wait: at first, at most.
CAUTIOUS, MOST_CAUTIOUS = 16, 1024


# All of it is the board's thread's.
class Habit:
    """Whether devices wait for others behind a site, as far as it has been seen.

    Where few threads were found to wait, the next calls have a thread for each device; then a call
    tries again with few. Whichever is right for a site, the other is soon tried seldom.
    """

    def __init__(self) -> None:
        self._cautious, self._next = 0, CAUTIOUS

    def is_cautious(self) -> bool:
        """Whether a call that ends now has a thread for each device."""
        if not self._cautious:
            return False
        self._cautious -= 1
        return True

    def note(self, *, waited: bool) -> None:
        """Learn whether the few threads of a call had to wait."""
        if waited:
            self._cautious, self._next = self._next, min(2 * self._next, MOST_CAUTIOUS)
        else:
            self._next = max(self._next // 2, CAUTIOUS)


class Batch:
    """Functions that end one call on its devices, each of which may wait for the others."""

    def __init__(self, functions: Sequence[Function], most: int) -> None:
        # No lock: a step on a deque is one under the interpreter's lock, and it does not matter if
        # two threads at a time start a helper.
        self.waiting = deque(functions)
        self.started, self.most = 0, most
        # The board's thread's.
        self.left, self.since = len(functions), time.monotonic()
        self.waited = False


class Endings:
    """Daemon threads that run functions, which may wait for each other."""

    def __init__(self) -> None:
        # Idle threads, by the queues that they listen to. No lock: `pop` and `append` of a list are
        # one step each. Threads are never ended: as many as devices ever were in flight.
        self._idle: list[queue.SimpleQueue[Batch]] = []
        # One entry for each function that is not over.
        self._open: deque[None] = deque()
        # The board's thread's: batches with few threads, and the habits that learn from them.
        self._watched: list[tuple[Batch, Habit]] = []

    def begin(self, functions: Sequence[Function], habit: Habit | None = None) -> None:
        """Run the functions on threads that do nothing else meanwhile.

        None: each has a thread, without a habit.
        """
        self._open.extend([None] * len(functions))
        if habit is None or habit.is_cautious():
            batch = Batch(functions, len(functions))
            for _ in functions:
                self._help(batch)
        else:
            batch = Batch(functions, threads.count())
            self._watched.append((batch, habit))
            self._help(batch)  # it calls more

    def watch(self) -> bool:
        """Help the batches whose threads wait. **Returns**: whether to call it again soon."""
        # In the board's thread, which may be late where it computes: they wait so much longer.
        now = time.monotonic()
        kept = []
        for batch, habit in self._watched:
            left = len(batch.waiting)
            if not left:
                habit.note(waited=batch.waited)
                continue
            kept.append((batch, habit))
            if left < batch.left:
                batch.left, batch.since = left, now
            elif now - batch.since >= PATIENCE:
                batch.waited, batch.since = True, now
                batch.most = 2 * batch.started
                for _ in range(min(left, batch.started)):
                    self._help(batch)
        self._watched = kept
        return bool(kept)

    def is_busy(self) -> bool:
        """Whether a function is not over."""
        return bool(self._open)

    def _help(self, batch: Batch) -> None:
        """Give the batch one more thread."""
        batch.started += 1
        try:
            batches = self._idle.pop()
        except IndexError:
            batches = queue.SimpleQueue()
            start(partial(self._work, batches))
        batches.put(batch)

    def _work(self, batches: queue.SimpleQueue[Batch]) -> None:
        while True:
            batch = batches.get()
            try:
                self._run(batch)
            except BaseException:  # the thread ends, and another does the rest
                self._help(batch)
                raise
            del batch  # else the last futures live until the next batch comes
            self._idle.append(batches)

    def _run(self, batch: Batch) -> None:
        waiting = batch.waiting
        while True:
            try:
                function = waiting.popleft()
            except IndexError:
                return
            if waiting and batch.started < batch.most:
                self._help(batch)
            try:
                function()
            finally:
                self._open.pop()


_ROUTINE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_routines: list[object] = []
"""Those of the system's threads, which keep only their addresses."""


def start(function: Function) -> None:
    """Run a function on a new daemon thread."""
    try:
        threading.Thread(target=function, name="gpusim.jax device", daemon=True).start()
    except RuntimeError:
        # Python begins to end, and waits for programs in flight (`Board.settle`). Since 3.12 it
        # starts no thread then, but the system does.
        routine = _ROUTINE(lambda _: function())
        _routines.append(routine)
        thread = ctypes.byref(ctypes.c_ulong())
        code = ctypes.PyDLL(None).pthread_create(thread, None, routine, None)
        if code:
            raise RuntimeError(f"pthread_create returns {code}: no thread for a device") from None
