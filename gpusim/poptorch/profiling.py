"""Tracepoints of a program: how long named parts of it take.

They are logged at DEBUG, and are events in the traces of executors with `enableProfiling`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from gpusim.poptorch._logging import logger
from gpusim.recording.traces import open_traces

__all__ = ["Channel"]


class Tracepoint:
    """A block whose time is logged and traced, also if it raises."""

    def __init__(self, channel: str, name: str) -> None:
        self._channel, self._name = channel, name

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        end = time.perf_counter()
        logger.debug("[%s] %s took %.6f s", self._channel, self._name, end - self._begin)
        for trace in open_traces():
            trace.host(self._name, self._channel, self._begin, end)


class Channel:
    """A name under which tracepoints are logged and traced.

    >>> channel = Channel("MyApp")
    >>> with channel.tracepoint("TimeThis"):
    ...     sum(range(10))
    45
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def tracepoint(self, name: str) -> Tracepoint:
        """Measure the time of a block, also if it raises."""
        return Tracepoint(self.name, name)

    def instrument(self, obj: Any, *methods: str) -> None:
        """Make a tracepoint of each call of some of an object's methods.

        **Raises**:

        - AttributeError: if a method is missing; nothing is changed then.
        """
        found = [(name, getattr(obj, name)) for name in methods]
        for name, method in found:
            setattr(obj, name, self._traced(name, method))

    def _traced(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with self.tracepoint(name):
                return method(*args, **kwargs)

        return traced
