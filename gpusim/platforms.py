"""Differences between Linux, which has everything, and macOS and Windows.

Modules are imported on all three. A part that a platform cannot run raises one error when it is
used, which names the part and what the platform lacks.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any

from .errors import GpusimError

__all__ = ["PLAIN", "after_fork", "lacks", "printable", "signals", "user_id"]

#: How a file is opened that others may have made: no link, no wait for a FIFO, not for children.
PLAIN: int = (
    getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
)


def after_fork(call: Callable[[], Any]) -> None:
    """Let the children that this process forks call a function first; nothing where none forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


def lacks(what: str, *names: str) -> GpusimError:
    """The error of a part that needs what this platform lacks.

    **Arguments**: `what` the part is called, in the plural; `names` of what is missing.

    >>> print(str(lacks("ranks that are processes", "fork")).replace(platform.system(), "Windows"))
    ranks that are processes need fork, which Windows lacks
    """
    return GpusimError(f"{what} need {' and '.join(names)}, which {_system()} lacks")


def _system() -> str:
    return {"Darwin": "macOS"}.get(platform.system(), platform.system() or "this platform")


def printable(stream: Any) -> None:
    """Let a stream print any text: a sign that its encoding lacks, as a Windows console's, is "?".

    >>> import io
    >>> with io.TextIOWrapper(io.BytesIO(), encoding="cp1252") as stream:
    ...     printable(stream)
    ...     print("1", chr(0x2192), "2", end="", file=stream, flush=True)
    ...     stream.buffer.getvalue()
    b'1 ? 2'
    """
    encoding = str(getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "")
    if encoding != "utf8" and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")


def signals(*names: str) -> tuple[Any, ...]:
    """The signals of these names that the platform has.

    >>> [found.name for found in signals("SIGTERM", "SIGNONE")]
    ['SIGTERM']
    """
    import signal

    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


def user_id() -> int:
    """The user's number; 0 on Windows, which has none."""
    return os.getuid() if hasattr(os, "getuid") else 0
