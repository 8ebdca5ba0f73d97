"""A check's view of the streams and events that the CPU plays.

Streams and events do their work at once here. A check follows what a GPU would wait for, and what
the host would.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["HOST_READS", "StreamWatch"]

_METHODS = (
    "item tolist numpy __array__ __bool__ __int__ __float__ __index__ __format__ __repr__ nonzero "
    "is_nonzero masked_select equal allclose unique"
)
_FUNCTIONS = "nonzero is_nonzero masked_select equal allclose unique"
#: Methods and functions of tensors for whose result the host waits.
HOST_READS = frozenset(
    [
        *(getattr(Tensor, name) for name in _METHODS.split()),
        *(getattr(torch, name) for name in _FUNCTIONS.split()),
    ]
)


# All is called in threads of the rank: by its own, and for `waits` and `host_waits` also by threads
# that the rank has started, with streams and events that the rank has made.
class StreamWatch(Protocol):
    """The part of a check that follows streams; see `CpuAsCuda.stream_watch`.

    Streams have an attribute `line` and events an attribute `point`, which are the check's alone.
    """

    def chose_device(self) -> None:
        """The program has chosen its GPU, as one of its first calls."""

    def made(self, stream: Any, is_own: bool) -> None:
        """A stream is made; not `is_own` if it stands for one that other code has made."""

    def recorded(self, event: Any, stream: Any) -> None:
        """An event is recorded behind the work of a stream."""

    def waits(self, stream: Any, source: Any) -> None:
        """The stream waits for an event, or for another stream."""

    def host_waits(self, source: Any, what: str) -> None:
        """The host waits for a stream or an event; for the whole device if `source` is None."""

    def host_reads(self, tensor: Tensor, what: str) -> None:
        """The host has read a tensor, by a method named `what`."""

    def pinned(self, tensor: Tensor, is_new: bool) -> None:
        """The tensor's memory is pinned; `is_new` if it was made so."""

    def moved(
        self, source: Tensor, result: Tensor, before: int | None, after: int, at_once: bool
    ) -> None:
        """A tensor is copied from a device to another, and the host waits if `at_once`."""

    def copied(self, target: Tensor, source: Tensor, at_once: bool) -> None:
        """`target.copy_(source)` was called, and the host waits if `at_once`."""

    def backward_begins(self) -> None: ...

    def backward_ends(self) -> None: ...
