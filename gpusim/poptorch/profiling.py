"""Tracepoints of a program: how long named parts of it take, logged at DEBUG.

PopTorch hands them to libpvti, of which there is none here.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpusim.poptorch._logging import logger

__all__ = ["Channel"]


class Channel:
    """A name under which tracepoints are logged.

    >>> channel = Channel("MyApp")
    >>> with channel.tracepoint("TimeThis"):
    ...     sum(range(10))
    45
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @contextmanager
    def tracepoint(self, name: str) -> Iterator[None]:
        """A block whose time is logged, also if it raises."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            logger.debug("[%s] %s took %.6f s", self.name, name, seconds)

    def instrument(self, obj: Any, *methods: str) -> None:
        """Make a tracepoint of each call of some of an object's methods.

        AttributeError for a method that it has not; nothing is changed then.
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
