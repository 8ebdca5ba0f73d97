"""A thread's wait until another thread hands over to it, on the same core where that is quick.

Linux wakes a thread on an idle core if there is one. If the waking thread goes to sleep itself,
that core had to be woken, which takes longer than many a collective: on two cores, 64 ranks in
turns need twice the time. So the woken thread may run on the waking thread's core only, until it
runs. Then its mask of cores is what it was: what it starts or computes is not bound to one core.
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
    """What one thread waits for, until another one wakes it. The wake may come first.

    >>> turn = HandOver()
    >>> turn.wake()
    >>> turn.wait()
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._thread = 0  # the kernel's number of the thread that waits
        self._system: Any = None
        self._mask: Any = None  # its cores,
        self._masked = False  # while it may run on one only

    def wait(self) -> None:
        """Wait to be woken, in the one thread that does."""
        if not self._thread:
            self._thread, self._system = threading.get_native_id(), _system()
            self._mask = ctypes.create_string_buffer(MASK_BYTES)
        self._lock.acquire()
        if self._masked:
            self._masked = False
            self._system.sched_setaffinity(0, MASK_BYTES, self._mask)

    def wake(self, here: bool = False) -> None:
        """Let the other thread go on: `here`, on this core, if this thread is about to wait."""
        system = self._system if here else None
        if system is not None and 0 <= (core := system.sched_getcpu()) < 8 * MASK_BYTES:
            self._masked = (
                system.sched_getaffinity(self._thread, MASK_BYTES, self._mask) == 0
                and system.sched_setaffinity(self._thread, MASK_BYTES, _only(core)) == 0
            )
        self._lock.release()
