"""Where a rank may wait for another outside of torch.distributed: in sleep, polls, sockets, locks.

In these calls a rank gives up its turn, or may lose it; see `maps.clock`. Ranks that are processes
may lose theirs anywhere, so that only sleeps and polls need to be known there.

Not known are waits in other C code, among them `with lock:` of a `threading.Lock` other than
`LOCKS`, and functions
that a module took by `from time import sleep` before the launch.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import io
import multiprocessing.connection
import multiprocessing.queues
import os
import select
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from torch import distributed as dist

from ....errors import GpusimError
from ..own.imports import when_imported
from ..private import LOCKS, replace
from . import store
from .waits import rank_that_waits

__all__ = ["polls_and_sleeps", "waits_outside"]

STORES = (dist.TCPStore, dist.FileStore, dist.HashStore)

_imports: Any = importlib  # whose locks of modules only this private name has

#: Functions and methods in which a rank may wait.
WAITS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (threading.Condition, ("wait",)),  # so of events, queues, futures, barriers, semaphores
    (threading.Thread, ("join",)),
    # Another rank may lose its turn in the midst of an import.
    (_imports._bootstrap._ModuleLock, ("acquire",)),
    (
        socket.socket,
        (
            "accept",
            "connect",
            "recv",
            "recv_into",
            "recvfrom",
            "recvfrom_into",
            "recvmsg",
            "recvmsg_into",
            "send",
            "sendall",
            "sendmsg",
            "sendto",
        ),
    ),
    (select, ("select",)),
    *(
        (getattr(selectors, name), ("select",))
        for name in ("SelectSelector", "PollSelector", "EpollSelector", "KqueueSelector")
        if hasattr(selectors, name)
    ),
    (subprocess.Popen, ("communicate", "wait")),
    (builtins, ("open",)),  # of a pipe with a name
    (io, ("open",)),
    (os, ("open", "read", "readv", "system", "wait", "wait3", "wait4", "waitid", "waitpid")),
    (
        multiprocessing.connection.Connection,
        ("poll", "recv", "recv_bytes", "recv_bytes_into", "send", "send_bytes"),
    ),
    (multiprocessing.queues.Queue, ("get", "put")),
    (multiprocessing.queues.SimpleQueue, ("get", "put")),
)

#: Questions to the file system that programs ask again and again.
QUESTIONS = ("access", "listdir", "lstat", "scandir", "stat")


@contextmanager
def waits_outside() -> Iterator[None]:
    """A block in which ranks, as threads, wait without their turn in all that is named here."""
    with polls_and_sleeps(), ExitStack() as stack:
        for owner, names in WAITS:
            for name in names:
                if hasattr(owner, name):
                    replace(stack, owner, name, _outside(owner, name, getattr(owner, name)))
        for name in store.WAITS:
            if hasattr(dist.Store, name):
                replace(stack, dist.Store, name, _in_store(name, getattr(dist.Store, name)))
        replace(stack, dist.TCPStore, "__init__", _outside(dist, "TCPStore", _make_tcp_store))
        when_imported(stack, LOCKS, functools.partial(_replace_lock, stack))
        if sys.platform != "win32":
            fcntl: Any = importlib.import_module("fcntl")
            replace(stack, fcntl, "flock", _outside(fcntl, "flock", fcntl.flock))
            if hasattr(fcntl, "F_OFD_SETLKW"):
                own = functools.partial(_lockf, fcntl, fcntl.fcntl)
                replace(stack, fcntl, "lockf", _lockf_of_ranks(fcntl.lockf, own))
        yield


@contextmanager
def polls_and_sleeps() -> Iterator[None]:
    """A block in which ranks that sleep, or ask the same again and again, let others run first."""
    with store.queues_of_prefixes(), ExitStack() as stack:
        replace(stack, time, "sleep", _sleep_of_ranks(time.sleep))
        if hasattr(os, "sched_yield"):
            replace(stack, os, "sched_yield", _yield_of_ranks(os.sched_yield))
        for name in QUESTIONS:
            replace(stack, os, name, _asked_again(name, getattr(os, name)))
        if dist.rpc.is_available():
            replace(stack, dist.rpc, "init_rpc", _refuse_rpc(dist.rpc.init_rpc))
        yield


def _outside(owner: Any, name: str, function: Callable[..., Any]) -> Any:
    what = f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        rank = rank_that_waits()
        if rank is None or rank.thread().outside:
            return function(*args, **named)
        with rank.outside(what):
            return function(*args, **named)

    return call


def _replace_lock(stack: ExitStack, module: ModuleType) -> None:
    name = LOCKS[module.__name__]
    if hasattr(module, name):
        replace(
            stack, module, name, LockOfRanks(getattr(module, name), f"{module.__name__}.{name}")
        )


class LockOfRanks:
    """A lock of a module, which a rank waits for without its turn.

    Ranks share the lock, and the rank that holds it may wait without its turn, as for a compiler.
    Another rank that waited for it with the turn would wait for ever.
    """

    def __init__(self, lock: Any, what: str) -> None:
        self._lock, self._what = lock, what

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        if not blocking:
            return False
        rank = rank_that_waits()
        if rank is None or rank.thread().outside:
            return bool(self._lock.acquire(timeout=timeout))
        with rank.outside(f"the lock {self._what}"):
            return bool(self._lock.acquire(timeout=timeout))

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *raised: object) -> None:
        self.release()


def _in_store(name: str, function: Callable[..., Any]) -> Any:
    """A method of torch's own stores. Those of ranks are written in Python, and wait themselves."""
    waits = _outside(dist.Store, name, function)

    @functools.wraps(function)
    def call(store: Any, *args: Any, **named: Any) -> Any:
        return (waits if _is_torchs(store) else function)(store, *args, **named)

    return call


def _is_torchs(store: Any) -> bool:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, STORES)


_make_tcp_store = dist.TCPStore.__init__


def _sleep_of_ranks(function: Callable[[float], None]) -> Any:
    @functools.wraps(function)
    def sleep(seconds: Any, /) -> None:
        rank = rank_that_waits()
        length = _seconds(seconds) if rank is not None else None
        if rank is None or length is None:
            function(seconds)  # which has the error for what is no length of time
        else:
            rank.sleep(length)

    return sleep


def _seconds(given: Any) -> float | None:
    """A length of time, as `time.sleep` takes it; None if it does not."""
    if isinstance(given, str | bytes | complex) or not hasattr(given, "__index__"):
        if not isinstance(given, float) and not hasattr(given, "__float__"):
            return None
    try:
        found = float(given)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if 0 <= found <= threading.TIMEOUT_MAX else None


def _yield_of_ranks(function: Callable[[], None]) -> Any:
    @functools.wraps(function)
    def sched_yield() -> None:
        function()
        rank = rank_that_waits()
        if rank is not None:
            rank.give_way()

    return sched_yield


def _asked_again(name: str, function: Callable[..., Any]) -> Any:
    """A question to the file system, before which others run first if it is asked all the time."""

    @functools.wraps(function)
    def ask(*args: Any, **named: Any) -> Any:
        rank = rank_that_waits()
        if rank is not None and rank.asks(name, *args[:1]):
            rank.give_way()
        return function(*args, **named)

    return ask


def _refuse_rpc(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def init_rpc(*args: Any, **named: Any) -> Any:
        rank = rank_that_waits()
        if rank is None:
            return function(*args, **named)
        raise GpusimError(
            f"torch.distributed.rpc.init_rpc of rank {rank.index}: simulated ranks have no RPC; "
            "use collectives, send and recv, or the store"
        )

    return init_rpc


def _lockf_of_ranks(function: Callable[..., Any], own: Callable[..., Any]) -> Any:
    """`fcntl.lockf`, whose locks a process has as a whole: of ranks, those of the open file."""
    waits = _outside(importlib.import_module("fcntl"), "lockf", own)

    @functools.wraps(function)
    def lockf(*args: Any, **named: Any) -> Any:
        return (function if rank_that_waits() is None else waits)(*args, **named)

    return lockf


def _lockf(
    fcntl: Any,
    control: Callable[..., Any],
    fd: Any,
    cmd: int,
    len: int = 0,
    start: int = 0,
    whence: int = 0,
    /,
) -> None:
    kinds = ((fcntl.LOCK_UN, fcntl.F_UNLCK), (fcntl.LOCK_SH, fcntl.F_RDLCK))
    kind = next((kind for bit, kind in kinds if cmd & bit), fcntl.F_WRLCK)
    if kind == fcntl.F_WRLCK and not cmd & fcntl.LOCK_EX:
        raise ValueError("unrecognized lockf argument")  # as Python says it
    how = fcntl.F_OFD_SETLK if cmd & fcntl.LOCK_NB else fcntl.F_OFD_SETLKW
    control(fd, how, struct.pack("hhqqi0q", kind, whence, start, len, 0))
