"""A thread's wait until another thread hands over to it, on the same core where that is quick.

Linux may wake a thread on an idle core. If the waking thread goes to sleep itself, that core had to
be woken, which takes longer than many a collective. So a thread that ran on another core than the
waking one's may run only there the next times, until it runs. Then its mask of cores is what it
was: what it starts or computes is not bound to one core.

Some kernels keep threads together by themselves; masks then cost more than they save.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from typing import Any

__all__ = ["HandOver"]

MASK_BYTES = 128
"""Of a mask of 1,024 cores, as the C library has it."""

KEPT = 8
"""How often a thread that ran elsewhere is kept on the waking thread's core, before it is free."""


@functools.cache
def _system() -> Any:
    """The C library, if threads can be kept on a core; its calls here are short, and keep the
    interpreter's lock."""
    if sys.platform != "linux":
        return None
    system = ctypes.PyDLL(None)
    mask = ctypes.create_string_buffer(MASK_BYTES)
    known = all(hasattr(system, f"sched_{name}") for name in ("getcpu", "getaffinity"))
    if not known or system.sched_getaffinity(0, MASK_BYTES, mask):
        return None
    return system if sum(byte.bit_count() for byte in mask.raw) > 1 else None


@functools.cache
def _only(core: int) -> bytes:
    return (1 << core).to_bytes(MASK_BYTES, "little")


class HandOver:
    """A wait of one thread, until another one wakes it. The wake may come first.

    >>> turn = HandOver()
    >>> turn.wake()
    >>> turn.wait()
    """

    def __init__(self) -> None:
        # Owner: one thread waits here all its life; any other may wake it, once for each wait. A
        # waker holds the scheduler's lock, so that there is one at a time. Fields below are written
        # by the waker before it releases `_lock`, or by the waiting thread after it has acquired
        # it: `_lock` is what orders them.
        self._lock = threading.Lock()
        self._lock.acquire()
        self._thread = 0  # the kernel's number of the thread that waits
        self._system: Any = None
        # The buffer is the waiting thread's, filled by the waker: what is to be restored.
        self._mask: Any = None  # its cores,
        self._masked = False  # while it may run on one only
        self._core = -1  # where it was woken without a mask
        self._kept = 0  # how often it is masked from now on

    def wait(self) -> None:
        """Wait to be woken, in the one thread that does."""
        # The first wait is in the thread whose HandOver it is: until then there is nothing to mask.
        if not self._thread:
            self._thread, self._system = threading.get_native_id(), _system()
            self._mask = ctypes.create_string_buffer(MASK_BYTES)
        self._lock.acquire()
        # In the thread itself, as soon as it runs: what it starts inherits its own cores, not one.
        if self._masked:
            self._masked = False
            self._system.sched_setaffinity(0, MASK_BYTES, self._mask)
        elif self._core >= 0 and self._core != self._system.sched_getcpu():
            self._kept = KEPT

    def wake(self, here: bool = False) -> None:
        """Let the other thread go on: `here`, on this core, if this thread is about to wait."""
        # None before the first wait: the thread has no number yet, and no core to be kept on.
        system = self._system if here else None
        # Forgotten with each wake-up: a core without a mask is compared once, by the next wait.
        self._core = -1
        if system is not None:
            self._core = system.sched_getcpu()
            if self._kept and 0 <= self._core < 8 * MASK_BYTES:
                self._kept -= 1
                self._masked = (
                    system.sched_getaffinity(self._thread, MASK_BYTES, self._mask) == 0
                    and system.sched_setaffinity(self._thread, MASK_BYTES, _only(self._core)) == 0
                )
        # The last thing here: from now on the fields are the other thread's.
        self._lock.release()
