"""Threads that the kernels share, as many as cores; who asks for work to be done takes part in it.
NumPy releases the interpreter's lock inside its loops, so threads add and copy at the same time."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from queue import SimpleQueue
from typing import Any

from fallback import limits

SETTING = "GPUSIM_THREADS"


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def configured() -> int:
    """The number of threads that the environment asks for.

    GPUSIM_THREADS wins, whatever the number of cores; OMP_NUM_THREADS only makes it less than that.
    ValueError for a GPUSIM_THREADS that is no positive integer.
    """
    given = os.environ.get(SETTING, "").strip()
    if given:
        if not (given.isascii() and given.isdigit() and int(given) > 0):
            raise ValueError(f"{SETTING}={given!r}: expected a positive integer")
        return int(given)
    outermost = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a level each
    if outermost.isascii() and outermost.isdigit() and int(outermost) > 0:
        return min(int(outermost), cores())
    return cores()


def count() -> int:
    """The number of threads at work at once, the caller's included; read from the environment on
    first use."""
    return _pool.count()


@contextmanager
def limited(threads: int) -> Iterator[None]:
    """Work with so many threads inside the `with` block, in the whole process."""
    global _pool
    before, _pool = _pool, _Pool(threads)
    try:
        yield
    finally:
        used, _pool = _pool, before
        used.dismiss()


def run(function: Callable[[Any], object], items: Iterable[Any]) -> None:
    """Call `function` on every item, in any order and on any thread; return when all are done.

    Helpers run in copies of the caller's context. The first exception, the caller's own
    KeyboardInterrupt too, leaves the items that nobody has begun undone, and is raised here when
    those begun have ended. A helper may call `run` itself: nobody ever waits for a free thread.
    """
    work = _Work(function, items)
    helpers = min(len(work.items), _pool.count()) - 1
    if helpers > 0:
        _pool.invite(work, helpers)
    try:
        work.take_part()
    finally:
        work.close()
    if work.error is not None:
        raise work.error


def share(function: Callable[[Any], object], items: Iterable[Any], work: int) -> None:
    """`run`, or the caller alone where waking the others would take longer than the work.

    `work` is about the number of elements that go through the kernel.
    """
    if work < limits.SHARED_WORK or _pool.count() == 1:
        for item in items:
            function(item)
    else:
        run(function, items)


class _Work:
    """The items of one call of `run`, and how many helpers are at them."""

    def __init__(self, function: Callable[[Any], object], items: Iterable[Any]) -> None:
        self.function = function
        self.items = deque(items)
        self.error: BaseException | None = None
        self._state = threading.Condition(threading.Lock())
        self._helpers = 0
        self._closed = False

    def take_part(self) -> None:
        """Do items until there are none left."""
        try:
            while True:
                try:
                    item = self.items.popleft()
                except IndexError:
                    return
                self.function(item)
        except BaseException:
            self.items.clear()
            raise

    def help(self, context: Context) -> None:
        """Take part, unless the caller is through already."""
        with self._state:
            if self._closed:
                return
            self._helpers += 1
        try:
            context.run(self.take_part)
        except BaseException as error:
            self.error = self.error or error
        finally:
            with self._state:
                self._helpers -= 1
                self._state.notify()

    def close(self) -> None:
        """Let nobody in any more, and wait for those inside."""
        with self._state:
            self._closed = True
            while self._helpers:
                self._state.wait()


class _Pool:
    """Helpers that wait for work, started when there is some for them."""

    def __init__(self, threads: int | None = None) -> None:
        self._count = threads
        self._invitations: SimpleQueue[tuple[_Work, Context] | None] = SimpleQueue()
        self._started = 0
        self._lock = threading.Lock()

    def count(self) -> int:
        if self._count is None:
            self._count = configured()
        return self._count

    def invite(self, work: _Work, helpers: int) -> None:
        """Ask `helpers` threads to take part in `work`; those that are busy may come too late."""
        if self._started < self.count() - 1:
            self._start()
        for _ in range(min(helpers, self._started)):
            self._invitations.put((work, copy_context()))

    def _start(self) -> None:
        with self._lock:
            while self._started < self.count() - 1:
                name = f"kernels {self._started + 1}"
                try:
                    threading.Thread(target=self._serve, name=name, daemon=True).start()
                except RuntimeError:  # no thread to be had: the caller works alone
                    return
                self._started += 1

    def _serve(self) -> None:
        invitations = self._invitations
        while (invitation := invitations.get()) is not None:
            work, context = invitation
            work.help(context)
            del invitation, work, context  # the arrays inside must not live until the next one

    def dismiss(self) -> None:
        """End the helpers."""
        for _ in range(self._started):
            self._invitations.put(None)


_pool = _Pool()


def _forget() -> None:
    """Threads do not live on in a forked child: it starts its own."""
    global _pool
    _pool = _Pool(_pool._count)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
