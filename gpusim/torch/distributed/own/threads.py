"""Threads that ranks start, and processes that they fork: each belongs to its rank.

The rank's own thread alone calls collectives.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from ....errors import GpusimError
from ....maps.workers import WorkerThread
from ..private import replace, saves_in_thread
from ..private_groups import groups_of

if TYPE_CHECKING:
    from ..runners.threads import Rank

__all__ = [
    "current_rank",
    "enter",
    "is_importing",
    "own_rank",
    "rank_of_thread",
    "record_of_starter",
    "threads_of_ranks",
]


class _Here(threading.local):
    """The rank of the calling thread: its own, or the one that has started it."""

    own: Rank | None = None
    starter: Rank | None = None
    submits: bool = False
    """Whether it gives a pool a call, which may start a thread of the pool."""


_here = _Here()


def enter(rank: Rank | None) -> None:
    """Make the calling thread the rank's own; no rank's if it is None."""
    _here.own, _here.starter = rank, None
    if rank is not None:
        rank.home = os.getpid()


def _leave_in_fork() -> None:
    """In a process that a rank has forked: be what the rank has started, and not the rank."""
    if _here.own is not None:
        _here.own, _here.starter = None, _here.own


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_fork)


def own_rank() -> Rank | None:
    """The rank whose own thread this is."""
    return _here.own


def rank_of_thread() -> Rank | None:
    """The rank whose own thread this is, or that has started it."""
    return _here.own or _here.starter


def is_importing(frame: FrameType | None = None) -> bool:
    """Whether the calling thread, or the frame, executes a module that is imported.

    This happens once for all ranks that are threads, whichever of them imports it first.
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def current_rank() -> Rank:
    """The rank whose thread this is.

    **Raises**: GpusimError in threads that are no rank.
    """
    if _here.own is not None:
        return _here.own
    if _here.starter is not None:
        raise _here.starter.thread_error("a call of torch.distributed")
    raise GpusimError(
        "the backend 'gpusim' was called from a thread that is no rank: start ranks by "
        "gpusim.torch.distributed.launch or `gpusim torchrun`, and call torch.distributed "
        "from a rank's own thread"
    )


def record_of_starter() -> dict[str, Any] | None:
    """torch's record of the groups of the rank that has started this thread.

    **Raises**: GpusimError if the rank has ended: torch would take the thread for a program without
    ranks.
    """
    rank = _here.starter
    if rank is not None and rank.record is None:
        raise GpusimError(
            f"a thread that rank {rank.index} started used torch.distributed after the rank's "
            "function had returned; join the thread in the rank"
        )
    return None if rank is None else rank.record


def _run(rank: Rank, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """Call a function in a thread that belongs to the rank meanwhile; ranks' own stay their own."""
    if _here.own is not None:
        return function(*args, **named)
    before, _here.starter = _here.starter, rank
    try:
        with rank.launch.of_thread(rank), groups_of(rank.record or {}):
            return function(*args, **named)
    finally:
        _here.starter = before


def _run_thread(rank: Rank, thread: Any, own: dict[str, Any], run: Callable[[], None]) -> None:
    """Run a thread whose `run` was replaced by this; `own` is the attribute that it had."""
    del thread.run  # which refers to the thread, and to all that the rank holds
    vars(thread).update(own)
    _run(rank, run)


@contextmanager
def threads_of_ranks() -> Iterator[None]:
    """A block in which threads, calls in pools of threads, and callbacks of futures belong to the
    rank that starts, submits or adds them.

    A pool may serve several ranks: its threads belong to none.
    """
    start_thread, submit_call = threading.Thread.start, ThreadPoolExecutor.submit
    add_callback = Future.add_done_callback

    def start(thread: Any) -> None:
        rank = rank_of_thread()
        if rank is not None and not isinstance(thread, WorkerThread) and not _here.submits:
            own = {"run": thread.run} if "run" in vars(thread) else {}
            thread.run = functools.partial(_run_thread, rank, thread, own, thread.run)
        start_thread(thread)

    def submit(pool: Any, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        rank = rank_of_thread()
        if rank is None:
            return submit_call(pool, function, *args, **named)
        if saves_in_thread(function) and not named.get("no_dist") and dist.is_initialized():
            raise rank.thread_error("async_save")
        _here.submits = True
        try:
            return submit_call(pool, _run, rank, function, *args, **named)
        finally:
            _here.submits = False

    def add_done_callback(future: Any, callback: Callable[[Any], Any]) -> None:
        rank = rank_of_thread()
        add_callback(future, callback if rank is None else functools.partial(_run, rank, callback))

    with ExitStack() as stack:
        replace(stack, threading.Thread, "start", start)
        replace(stack, ThreadPoolExecutor, "submit", submit)
        replace(stack, Future, "add_done_callback", add_done_callback)
        yield
