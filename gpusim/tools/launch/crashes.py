"""Standard error of instances that fail: held back, and read.

A failed run would show the traceback of every instance, most of them of errors that the first one
has caused. So what looks like the end of an instance is held back, until the run has failed and the
report takes its place, or for some seconds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gpusim.runtime.frames import is_library, place

__all__ = ["Crash", "HeldErrors", "read_crash"]

RELEASED_AFTER = 5.0  # seconds from the first line; an instance that fails ends within two
TAG = re.compile(rb"\[[^],]*,(\d+)\]<(?:stdout|stderr)>: ?")
# Tracebacks, syntax errors, faulthandler's, gpusim's own lines, MPI's; of one instance.
BEGINNINGS = re.compile(
    rb"(  \+ Exception Group )?Traceback \(most recent call last\)|  File \"|Fatal Python error: "
    rb"|gpusim: instance \d+ |\[[^]]+:\d+\] \*\*\* |-{40}"
)

FRAME = re.compile(r'(?:  \| )?\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:,? in (?P<in>.+))?')
HEADER = re.compile(r"Traceback \(most recent call last\):|(Current t|T)hread 0x\w+ .*:")
CAUSED = "The above exception was the direct cause of the following exception:"
MEANWHILE = "During handling of the above exception, another exception occurred:"
FATAL = "Fatal Python error: "
NOT_IN_MESSAGE = ("gpusim: instance ", "Extension modules: ")


@dataclass
class Held:
    since: float
    lines: list[bytes] = field(default_factory=list)


class HeldErrors:
    """The lines of instances that may be their last."""

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        self._continues: int | None = None  # the instance whose unfinished line is held

    def take(self, piece: bytes, *, continued: bool) -> bool:
        """Whether to hold the line back, or a part of it; `continued`: not the first part."""
        if continued:
            instance, begins = self._continues, False
        else:
            match = TAG.match(piece)
            instance = int(match[1]) if match else None
            begins = bool(match and BEGINNINGS.match(piece, match.end()))
        holds = instance is not None and (begins or instance in self._held)
        if holds:
            assert instance is not None
            self._held.setdefault(instance, Held(time.monotonic())).lines.append(piece)
        self._continues = instance if holds else None
        return holds

    def __bool__(self) -> bool:
        return bool(self._held)

    def release(self, older_than: float = RELEASED_AFTER) -> bytes:
        """The lines of the instances that went on for some seconds, which are held no longer."""
        limit = time.monotonic() - older_than
        over = [instance for instance, held in self._held.items() if held.since <= limit]
        return b"".join(b"".join(self._held.pop(instance).lines) for instance in over)

    def texts(self) -> dict[int, str]:
        """The held lines of each instance, without its tag."""
        return {
            instance: b"".join(TAG.sub(b"", line) for line in held.lines).decode(errors="replace")
            for instance, held in sorted(self._held.items())
        }


@dataclass(frozen=True)
class Crash:
    """An uncaught error.

    **Arguments**:

    - `error`: its type, module included, and its message.
    - `frames`: the lines of the user's program that led to it: "train.py:13 in f: code".
    - `place`: file:line of the last one; empty if there is none.
    """

    error: str
    frames: tuple[str, ...]
    place: str

    @property
    def kind(self) -> str:
        """The type of the error, without its module."""
        return self.error.partition(":")[0].rpartition(".")[2]

    @property
    def message(self) -> str:
        """The type and the message."""
        _, colon, rest = self.error.partition(":")
        return self.kind + colon + rest


def read_crash(text: str) -> Crash | None:
    """The uncaught error in what an instance has written; None if there is no traceback.

    >>> crash = read_crash('''Traceback (most recent call last):
    ...   File "train.py", line 7, in <module>
    ...     main()
    ... ValueError: no data''')
    >>> crash.error, crash.place, crash.frames
    ('ValueError: no data', 'train.py:7', ('train.py:7 in <module>: main()',))
    """
    # Of chained errors the cause shows the place, and the last one is what ended the program.
    parts = [[*part.splitlines()] for part in re.split(f"{CAUSED}|{MEANWHILE}", text)]
    errors = [error for error in map(_read_part, parts) if error is not None]
    if not errors:
        return None
    last = errors[-1]
    if CAUSED in text and len(errors) > 1:
        cause = errors[-2]
        frames = (*last.frames, f"caused by {cause.message}", *cause.frames)
        return Crash(last.error, frames, cause.place or last.place)
    return last


def _read_part(lines: list[str]) -> Crash | None:
    """One traceback: the last in these lines."""
    begins = [n for n, line in enumerate(lines) if HEADER.match(line.strip()) or FATAL in line]
    begins = begins or [n for n, line in enumerate(lines) if FRAME.match(line)]
    if not begins:
        return None
    fatal = [line for line in lines if line.startswith(FATAL)]
    lines = lines[begins[-1] :]
    frames = [*_frames(lines)]
    error: list[str] = []
    after = False
    for line in lines if not fatal else ():
        after = after or (not line.startswith(" ") and line != "" and not HEADER.match(line))
        if after and not line.startswith(NOT_IN_MESSAGE):
            error.append(line)
    if fatal:
        frames.reverse()  # faulthandler begins with the innermost
    shown = [frame for frame in frames if not is_library(frame[0])] or frames[-1:]
    texts = []
    for file, number, function, code in shown:
        within = f" in {function}" if function else ""
        texts.append(f"{place(file, number)}{within}" + (f": {code}" if code else ""))
    here = place(*shown[-1][:2]) if shown else ""
    message = "\n".join(fatal or error).strip()
    return Crash(message, tuple(texts), here) if message else None


def _frames(lines: Iterable[str]) -> Iterator[tuple[str, int, str, str]]:
    """File, line, function and code of each frame."""
    frame: tuple[str, int, str] | None = None
    for line in lines:
        match = FRAME.match(line)
        if frame is not None:
            code = "" if match or not line.startswith("   ") else line.strip()
            yield (*frame, code)
            frame = None
        if match:
            frame = match["file"], int(match["line"]), match["in"] or ""
    if frame is not None:
        yield (*frame, "")
