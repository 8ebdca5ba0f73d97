"""Standard output and error of simulated ranks, and the line of progress below them."""

from __future__ import annotations

import functools
import io
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, TextIO

from gpusim.recording import RecordedCall
from gpusim.words import count

__all__ = ["INTERVAL", "RankOutputs", "TaggedStream", "tagged_output"]

INTERVAL = 0.2
"""Seconds between two lines of progress."""

ERASE = "\r\x1b[K"
"""Takes the line of a terminal away."""


class RankOutputs:
    """Standard output and error, whose lines have the tag of the rank that writes them.

    A `terminal` shows below them how many calls were made, and the last one.
    """

    def __init__(self, only: int | None, terminal: TextIO | None) -> None:
        self.only, self.terminal = only, terminal
        self.tagged: Any = ()
        self.process = os.getpid()
        #: The rank and the terminal of a line without an end: a prompt, or a bar of progress.
        self.open: tuple[int | None, TextIO] | None = None
        self.local = threading.local()
        self.lock = threading.Lock()
        self.begun = self.last = time.monotonic()
        self.calls = 0
        self.shown = False

    def show_progress(self, call: RecordedCall) -> None:
        """Count a call, and show it if some time has passed since the last one that was shown."""
        with self.lock:
            self.calls += 1
            now = time.monotonic()
            if self.terminal is None or self.open or now - self.last < INTERVAL:
                return
            self.last = now
            minutes, seconds = divmod(int(now - self.begun), 60)
            text = (
                f"{minutes}:{seconds:02}  {count(self.calls, 'call')}, now {call.operation} "
                "of rank "
                f"{call.rank} at {Path(call.site).name}"
            )
            self.terminal.write(f"{ERASE}{text[: get_terminal_size().columns - 1]}")
            self.terminal.flush()
            self.shown = True

    def erase_progress(self) -> None:
        """Take the line of progress away."""
        if self.terminal is not None and self.shown:
            self.terminal.write(ERASE)
            self.terminal.flush()
            self.shown = False

    def enter(self, rank: int) -> None:
        """The calling thread is this rank's."""
        self.local.rank, self.local.partial = rank, {}

    @contextmanager
    def of_rank(self, rank: int) -> Iterator[None]:
        """A block of a rank's thread, or of one that works for the rank meanwhile."""
        before = vars(self.local).copy()
        self.enter(rank)
        try:
            yield
        finally:
            self.leave()
            vars(self.local).update(before)

    def leave(self) -> None:
        """Write the lines that have no end."""
        partial: Mapping[TextIO, str] = self.local.partial
        for stream, text in partial.items():
            if text:
                self.put(stream, f"{text}\n", f"[rank{self.local.rank}]: ")
        self.local.rank = None

    def follow_process(self, rank: int) -> None:
        """In a rank's process: what logs keep of the streams is its own, and so is its input.

        If the output of one rank is shown alone, this rank alone has the input.
        """
        if os.getpid() == self.process:
            return
        self.enter(rank)  # for processes that it forks: its own output goes to the parent
        streams: Any = sys.stdout, sys.stderr
        redirect_logs(self.tagged, streams)
        with suppress(OSError):  # the process has no input at all
            if rank == self.only and os.isatty(0):
                # input() edits lines, and writes its prompt past the streams: it has to come after
                # what they have written.
                sys.stdin = open(0, closefd=False, encoding="locale")
                for stream in streams:
                    stream.waits = True
            elif self.only in (None, rank):
                sys.stdin = input_by_bytes()

    def put(self, stream: TextIO, text: str, tag: str) -> None:
        """Write a line or a part of one, which goes on in the line that the rank has open."""
        me = getattr(self.local, "rank", None), stream
        with self.lock:
            self.erase_progress()
            if self.open == me:
                tag = ""
            elif self.open:
                self.open[1].write("\n")
            stream.write(tag + text)
            self.open = me if not text.endswith("\n") and stream.isatty() else None

    def write(self, stream: TextIO, text: str) -> int:
        rank = getattr(self.local, "rank", None)
        if rank in (None, self.only):  # as it comes: a debugger's prompt has no end of line
            if text:
                self.put(stream, text, "")
        elif self.only is None:
            *lines, rest = (self.local.partial.get(stream, "") + text).split("\n")
            for line in lines:
                tag = f"[rank{rank}]: "
                self.put(stream, f"{line}\n", "" if line.startswith(tag[:-1]) else tag)  # of a log
            self.local.partial[stream] = rest
        return len(text)

    def flush(self, stream: TextIO) -> None:
        """Show a line's beginning on a terminal, where it may be a prompt.

        In a process that a rank has forked it may be the end.
        """
        partial = getattr(self.local, "partial", {})
        if partial.get(stream) and (stream.isatty() or os.getpid() != self.process):
            self.put(stream, partial.pop(stream), f"[rank{self.local.rank}]: ")
        stream.flush()


def input_by_bytes() -> TextIO:
    """The standard input, of which nothing is read ahead: what a rank leaves, the next one reads.

    Its number is not 0, as input() then writes its prompt to the rank's own output.
    """
    bytewise: Any = io.TextIOWrapper(io.BufferedReader(io.FileIO(os.dup(0)), 1), encoding="locale")
    bytewise._CHUNK_SIZE = 1  # of CPython; elsewhere only what is left unread differs
    stream: TextIO = bytewise
    return stream


def _free_lock(outputs: Callable[[], RankOutputs | None]) -> None:
    """In a fork: the lock may be another thread's, which is not there."""
    found = outputs()
    if found is not None:
        found.lock = threading.Lock()


class TaggedStream:
    """A text stream that writes by RankOutputs; all else is the stream's own."""

    def __init__(self, stream: TextIO, outputs: RankOutputs) -> None:
        self._stream, self._outputs = stream, outputs

    def flush(self) -> None:
        self._outputs.flush(self._stream)

    def write(self, text: str) -> int:
        return self._outputs.write(self._stream, text)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def tagged_output(only: int | None, quiet: bool = False) -> Iterator[RankOutputs]:
    """A block in which standard output and error are tagged; `quiet` without progress."""
    streams = sys.stdout, sys.stderr
    outputs = RankOutputs(only, sys.stderr if sys.stderr.isatty() and not quiet else None)
    tagged: Any = [TaggedStream(stream, outputs) for stream in streams]
    outputs.tagged = tagged
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=functools.partial(_free_lock, weakref.ref(outputs)))
    sys.stdout, sys.stderr = tagged
    redirect_logs(streams, tagged)
    try:
        yield outputs
    finally:
        redirect_logs(tagged, streams)
        sys.stdout, sys.stderr = streams
        outputs.erase_progress()


def redirect_logs(streams: Sequence[Any], others: Sequence[Any]) -> None:
    """Let the loggers that write to a stream, as torch's do, write to another in its place."""
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", ()):
            stream = vars(handler).get("stream")  # elsewhere it is a property: the stream of now
            if isinstance(handler, logging.StreamHandler) and stream in streams:
                handler.setStream(others[streams.index(stream)])
