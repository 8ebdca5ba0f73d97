"""Threads that the kernels share, as many as cores; the thread that asks for work takes part in it.
NumPy releases the interpreter's lock inside its loops, so threads add and copy at the same time."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any

from . import limits

SETTING = "GPUSIM_THREADS"
DIGITS = 9
"""The most digits of a number of threads."""


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_count() -> int:
    """The number of threads that the environment asks for.

    GPUSIM_THREADS wins, whatever the number of cores; OMP_NUM_THREADS only makes it less than that.
    ValueError for a GPUSIM_THREADS that is not a positive integer.
    """
    given = os.environ.get(SETTING, "").strip()
    if given:
        # int() refuses thousands of digits with a text that names no variable.
        number = int(given) if given.isascii() and given.isdigit() and len(given) <= DIGITS else 0
        if number < 1:
            raise ValueError(f"{SETTING}={given[:40]!r}: expected a positive integer")
        return number
    outermost = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a level each
    if outermost.isascii() and outermost.isdigit() and len(outermost) <= DIGITS:
        return min(int(outermost) or cores(), cores())
    return cores()


def count() -> int:
    """The number of threads that work at once, the caller included.

    It is read from the environment on first use.
    """
    return _pool.count()


@contextmanager
def limited(threads: int) -> Iterator[None]:
    """Work with this number of threads inside the `with` block, in the whole process."""
    global _pool
    before, _pool = _pool, _Pool(threads)
    try:
        yield
    finally:
        used, _pool = _pool, before
        used.helpers().shutdown(wait=False)


def run(function: Callable[[Any], object], items: Iterable[Any]) -> None:
    """Call `function` on every item, in any order and on any thread; return when all are done.

    The caller takes part, so that it never waits for a free thread: a helper may call `run`.
    Helpers run in copies of the caller's context. The first exception, also a KeyboardInterrupt of
    the caller, drops the items that have not begun. It is raised here when those begun have ended.
    """
    waiting = deque(items)

    def take_part() -> None:
        try:
            while waiting:
                try:
                    item = waiting.popleft()
                except IndexError:  # another thread was faster
                    return
                function(item)
        except BaseException:
            waiting.clear()
            raise

    tickets = _pool.invite(take_part, min(len(waiting), _pool.count()) - 1)
    try:
        take_part()
    finally:
        wait([ticket for ticket in tickets if not ticket.cancel()])
    for ticket in tickets:
        if not ticket.cancelled():
            ticket.result()


def share(function: Callable[[Any], object], items: Iterable[Any], work: int) -> None:
    """`run`, or the caller alone where waking the others would take longer than the work.

    `work` is about the number of elements that go through the kernel.
    """
    if work < limits.SHARED_WORK or _pool.count() == 1:
        for item in items:
            function(item)
    else:
        run(function, items)


class _Pool:
    """The helpers, started when there is work for them."""

    def __init__(self, threads: int | None = None) -> None:
        self._count = threads
        self._helpers: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def count(self) -> int:
        if self._count is None:
            self._count = default_count()
        return self._count

    def helpers(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._helpers is None:
                most = max(1, self.count() - 1)
                self._helpers = ThreadPoolExecutor(most, thread_name_prefix="kernels")
            return self._helpers

    def invite(self, take_part: Callable[[], None], helpers: int) -> list[Future[None]]:
        """Ask helpers to take part in some work; each holds a ticket, which can be cancelled.

        A ticket is valid even if its submission fails halfway: the caller then cancels it.
        """
        tickets: list[Future[None]] = []
        try:
            for _ in range(helpers):
                tickets.append(Future())
                self.helpers().submit(_help, tickets[-1], copy_context(), take_part)
        except RuntimeError:  # no thread can be started, or the interpreter is ending
            pass
        return tickets


def _help(ticket: Future[None], context: Context, take_part: Callable[[], None]) -> None:
    if not ticket.set_running_or_notify_cancel():
        return
    try:
        context.run(take_part)
    except BaseException as error:
        ticket.set_exception(error)
    else:
        ticket.set_result(None)


_pool = _Pool()


def _forget() -> None:
    """Threads do not live on in a forked child: it starts its own."""
    global _pool
    _pool = _Pool(_pool._count)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
