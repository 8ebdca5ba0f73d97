"""Reads of tensors' values by code that a device compiles: which lines, and on which replicas.

What runs such code looks for a `listener`, and tells it. This module imports nothing, so that a
command can listen to a program that has not imported anything yet.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["HostRead", "HostReads", "listener", "listening"]


@dataclass
class HostRead:
    """A line of a program that reads values.

    **Attributes**: `site` is file:line, `value` is the first that was read, as "float32[2]", `ways`
    are the functions that read, `places` are the models in which the line stands, and `replicas`
    are those that read.
    """

    site: str
    value: str
    ways: dict[str, None] = field(default_factory=dict)
    places: dict[str, None] = field(default_factory=dict)
    replicas: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        return (
            f"{self.value} is read by {' and '.join(self.ways)} in {' and '.join(self.places)}, "
            "which is compiled before its tensors have values"
        )


class HostReads:
    """The lines that have read values, in the order in which they first did."""

    def __init__(self) -> None:
        # Replicas may be threads: `_lock` guards `_lines`.
        self._lock = threading.Lock()
        self._lines: dict[str, HostRead] = {}

    def add(self, site: str, value: str, way: str, place: str, replicas: Iterable[int]) -> None:
        """Note that a line has read a value on replicas."""
        with self._lock:
            line = self._lines.setdefault(site, HostRead(site, value))
            line.ways[way] = line.places[place] = None
            line.replicas.update(replicas)

    def __iter__(self) -> Iterator[HostRead]:
        with self._lock:
            return iter([*self._lines.values()])


_listener: HostReads | None = None  # the process's; `listening` alone sets it


def listener() -> HostReads | None:
    """The listener that is told of reads; None without one.

    >>> listener() is None
    True
    """
    return _listener


@contextmanager
def listening() -> Iterator[HostReads]:
    """A block in which the reads of this process are noted.

    >>> with listening() as reads:
    ...     listener().add("model.py:7", "float32[]", "Tensor.item()", "the forward of Net", [1])
    >>> [str(each) for each in reads]
    ['float32[] is read by Tensor.item() in the forward of Net, which is compiled before its
    tensors have values']
    """
    global _listener
    around, _listener = _listener, HostReads()
    try:
        yield _listener
    finally:
        _listener = around
