"""Standard output of a test's ranks: with their tags, or kept for `capsys`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from gpusim.tools.outputs import RankOutputs, TaggedStream

__all__ = ["RankedOutputs"]


class RankedOutputs(RankOutputs):
    """Output with the tags of ranks; or, for `capsys`, kept for each rank."""

    def __init__(self, keep: bool) -> None:
        super().__init__(None, None)
        self.keep = keep
        self.kept: dict[int, dict[TextIO, str]] = {}

    def enter(self, rank: int) -> None:
        super().enter(rank)
        self.local.kept = self.kept.setdefault(rank, {})  # also of threads that the rank starts

    def show_kept(self) -> None:
        """Write what the rank of this thread has written and not read."""
        with self.lock:
            kept, self.local.kept = dict(self.local.kept), {}
        for stream, text in kept.items():
            super().write(stream, text)

    def write(self, stream: TextIO, text: str) -> int:
        if not self.keep or getattr(self.local, "rank", None) is None:
            return super().write(stream, text)
        with self.lock:
            self.local.kept[stream] = self.local.kept.get(stream, "") + text
        return len(text)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """A block in which standard output and error go here."""
        self.streams = sys.stdout, sys.stderr
        tagged: Any = [TaggedStream(stream, self) for stream in self.streams]
        sys.stdout, sys.stderr = tagged
        try:
            yield
        finally:
            sys.stdout, sys.stderr = self.streams
