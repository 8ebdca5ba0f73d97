"""Memory of large results, used again once nothing refers to it any more.
New memory is cleared by the system page by page when it is first touched, which can take several
times as long as the copy or the fold that writes it."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

SETTING = "GPUSIM_KEEP_MIB"

# Smaller arrays come from NumPy, whose own allocator keeps what is freed.
SMALLEST = 1 << 20
# A block serves requests that leave less than this part of it unused.
WASTE = 4

MOST_KEPT = 1 << 30
MEMORY_SHARE = 16


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An uninitialised C-contiguous array; a large one reuses memory.

    >>> empty((2, 3), np.float32).shape
    (2, 3)
    """
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    if size < SMALLEST or kind.hasobject:
        return np.empty(shape, kind)
    block = _free_list.take(size)
    return np.asarray(_Loan(block, _free_list))[:size].view(kind).reshape(shape)


def keep_at_most(size: int) -> int:
    """Keep at most `size` bytes of memory that is not in use; returns the previous limit.

    0 returns all of it to the system.
    """
    before, _free_list.most = _free_list.limit(), size
    _free_list.trim()
    return before


def default_limit() -> int:
    """The number of bytes to keep: GPUSIM_KEEP_MIB, else 1/16 of the memory, at most 1 GiB.

    ValueError if GPUSIM_KEEP_MIB is not an integer from 0 on.
    """
    given = os.environ.get(SETTING, "").strip()
    if given:
        # int() refuses thousands of digits with a text that names no variable.
        if not (given.isascii() and given.isdigit() and len(given) <= 18):
            raise ValueError(
                f"{SETTING}={given[:40]!r}: expected a number of mebibytes, 0 for none"
            )
        return int(given) << 20
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not available on every system
        return 0
    return min(MOST_KEPT, memory // MEMORY_SHARE)


class _Loan:
    """A block while arrays refer to it: every view of it keeps this object alive."""

    __slots__ = ("__array_interface__", "block", "free_list")

    def __init__(self, block: NDArray[np.uint8], free_list: _FreeList) -> None:
        self.block = block
        self.free_list = free_list
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        self.free_list.give(self.block)


class _FreeList:
    """Blocks that are not in use, the ones used last at the end."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.free: list[NDArray[np.uint8]] = []
        # Returned blocks wait here: arrays die anywhere, also while this thread holds the lock.
        self.returned: deque[NDArray[np.uint8]] = deque()
        self.lock = threading.Lock()

    def limit(self) -> int:
        if self.most is None:
            self.most = default_limit()
        return self.most

    def take(self, size: int) -> NDArray[np.uint8]:
        """A block of at least `size` bytes: the smallest that serves, or a new one."""
        with self.lock:
            self._collect()
            serving = [
                (block.size, number)
                for number, block in enumerate(self.free)
                if size <= block.size <= size + size // WASTE
            ]
            if serving:
                return self.free.pop(min(serving)[1])
            self._drop(size)
        return np.empty(size, np.uint8)

    def give(self, block: NDArray[np.uint8]) -> None:
        """Take a block back, in whatever thread its last array has died."""
        self.returned.append(block)
        if self.lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self.lock.release()

    def trim(self) -> None:
        """Keep no more than may be kept."""
        with self.lock:
            self._collect()

    def _collect(self) -> None:
        while self.returned:
            self.free.append(self.returned.popleft())
        self._drop(0)

    def _drop(self, size: int) -> None:
        """Return the least recently used blocks, till `size` bytes more may be kept."""
        kept = sum(block.size for block in self.free)
        while self.free and kept + size > self.limit():
            kept -= self.free.pop(0).size


_free_list = _FreeList()


def _forget() -> None:
    """A forked child starts empty: a thread that it does not have may hold the lock."""
    global _free_list
    _free_list = _FreeList(_free_list.most)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
