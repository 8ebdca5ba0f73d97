"""The progress bar of compilation."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta

__all__ = ["ProgressBar"]

WIDTH = 20


class ProgressBar:
    """Called with the progress and its total; draws on standard error if that is a terminal.

    `compilation_time` is the time since the first call; None before it.

    >>> bar = ProgressBar()
    >>> bar(0, 10)
    >>> bar(10, 10)
    >>> bar.compilation_time >= timedelta(0)
    True
    """

    def __init__(self) -> None:
        self.compilation_time: timedelta | None = None
        self._start: datetime | None = None

    def __call__(self, progress: int, total: int) -> None:
        now = datetime.now()
        self._start = self._start or now
        self.compilation_time = now - self._start
        if sys.stderr.isatty():
            end = "\n" if progress >= total else ""
            sys.stderr.write(f"\r{drawn(progress, total, self.compilation_time)}{end}")
            sys.stderr.flush()
        if progress >= total:
            self._start = None  # the next call begins another compilation

    def abandon(self) -> None:
        """End the line of a bar that will not be full."""
        if self._start is not None and sys.stderr.isatty():
            sys.stderr.write("\n")
            sys.stderr.flush()
        self._start = None


def drawn(progress: int, total: int, taken: timedelta) -> str:
    """
    >>> drawn(3, 4, timedelta(seconds=61))
    'Graph compilation:  75%|###############     | 3/4 [01:01]'
    """
    share = progress / total if total else 1.0
    bar = "#" * int(share * WIDTH)
    minutes, seconds = divmod(int(taken.total_seconds()), 60)
    clock = f"{minutes:02d}:{seconds:02d}"
    return f"Graph compilation: {share:4.0%}|{bar:<{WIDTH}}| {progress}/{total} [{clock}]"
