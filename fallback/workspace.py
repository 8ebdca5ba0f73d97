"""Buffers the size of one block, used again from block to block and step to step.
A workspace belongs to one thread."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Workspace:
    """A pool of flat buffers of `capacity` elements, by dtype."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free: dict[np.dtype[Any], list[NDArray[Any]]] = {}

    def take(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """An uninitialised C-contiguous array; larger ones than `capacity` are not used again."""
        size = math.prod(shape)
        free = self._free.get(dtype)
        if free and size <= self.capacity:
            buffer = free.pop()
        else:
            buffer = np.empty(max(size, self.capacity), dtype)
        return buffer[:size].reshape(shape)

    def give(self, array: NDArray[Any]) -> None:
        """Take back what `take` returned."""
        buffer = array.base
        assert isinstance(buffer, np.ndarray)
        if buffer.size == self.capacity:
            self._free.setdefault(buffer.dtype, []).append(buffer)


class _Own(threading.local):
    workspace: Workspace | None = None


_own = _Own()


def own_workspace(capacity: int) -> Workspace:
    """This thread's workspace, kept from call to call: fresh memory is slow to touch."""
    workspace = _own.workspace
    if workspace is None or workspace.capacity != capacity:
        workspace = _own.workspace = Workspace(capacity)
    return workspace
