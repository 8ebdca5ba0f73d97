"""What each instance is doing, for the launcher to say when the instance is gone.

An instance writes into a file of its own in the folder $GPUSIM_ACTIVITY; without it, nothing.
"""

from __future__ import annotations

import atexit
import mmap
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpusim.runtime import environment

__all__ = ["ENDED", "FOLDER", "Activity", "note", "read"]

FOLDER = "GPUSIM_ACTIVITY"  # the variable that names the folder
ENDED = "the end of its program, waiting for the others to end too"  # in MPI_Finalize

# The file: a counter and the process id; then two slots, of which the counter's last bit says
# which one holds. The other one is written, then the counter: a process that dies on the way
# leaves what it said before. The checksum is for processors that reorder stores.
COUNTER = struct.Struct("=QQ")
SLOT = struct.Struct("=dIi")  # since, checksum, length of the text (-1 for None)
LONGEST = 2000  # bytes of text
SLOT_BYTES = SLOT.size + LONGEST
FILE_BYTES = COUNTER.size + 2 * SLOT_BYTES
TRIES = 100  # of reading while the instance writes
NAME = re.compile(r"instance-(\d+)")


@dataclass(frozen=True)
class Activity:
    """What an instance was doing when it last said so.

    **Arguments**

    - `text`: what blocks it; None if nothing does, and it runs code of its own.
    - `since`: when it said so, as `time.time()`.
    - `pid`: its process.
    """

    text: str | None
    since: float
    pid: int


def note(text: str | None) -> None:
    """Say what this instance is about to block in; None when it goes on.

    Never raises: a full disk or a folder that is missing ends the notes, not the program.
    """
    global _write
    write = _write
    if write is None:
        write = _write = opened(os.environ)
    write(text)


def read(folder: str | os.PathLike[str]) -> dict[int, Activity]:
    """The last notes of those instances that have made any, by instance; empty without a folder."""
    found = {}
    try:
        paths = sorted(Path(folder).iterdir())
    except OSError:
        return {}
    for path in paths:
        match = NAME.fullmatch(path.name)
        if match and (activity := last_note(path)):
            found[int(match[1])] = activity
    return dict(sorted(found.items()))


# ---------------------------------------------------------------- writing

_write: Callable[[str | None], None] | None = None  # None: not yet opened


def silent(text: str | None) -> None:
    """What `note` does where nobody reads."""


class Writer:
    """The file of this instance, mapped."""

    def __init__(self, path: Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # Reserved, not just sized: storing into a hole of a full disk is a SIGBUS.
            reserve(file, FILE_BYTES)
            self.memory = mmap.mmap(file, FILE_BYTES)
        finally:
            os.close(file)
        self.words = memoryview(self.memory)[: COUNTER.size].cast("Q")  # stored whole
        self.words[1] = os.getpid()
        self.lock = threading.Lock()

    def __call__(self, text: str | None) -> None:
        since = time.time()
        said = b"" if text is None else text[:LONGEST].encode(errors="replace")[:LONGEST]
        length = -1 if text is None else len(said)
        with self.lock:
            counter = self.words[0] + 1
            start = COUNTER.size + SLOT_BYTES * (counter & 1)
            SLOT.pack_into(self.memory, start, since, checksum(since, said), length)
            self.memory[start + SLOT.size : start + SLOT.size + len(said)] = said
            self.words[0] = counter


def opened(environ: Mapping[str, str]) -> Callable[[str | None], None]:
    """What writes the notes of this process."""
    folder = environ.get(FOLDER)
    if not folder:
        return silent
    try:
        writer = Writer(Path(folder) / f"instance-{environment.read(environ).instance}")
    except (OSError, ValueError):
        return silent
    atexit.register(note, ENDED)
    return writer


def reserve(file: int, length: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, length)
    else:
        os.ftruncate(file, length)


def forget() -> None:
    """A forked child is not the instance: it must not speak for it."""
    global _write
    _write = silent


os.register_at_fork(after_in_child=forget)


# ---------------------------------------------------------------- reading


def last_note(path: Path) -> Activity | None:
    """What the file says; None if it says nothing yet, or is none of ours."""
    for _ in range(TRIES):
        try:
            content = path.read_bytes()
        except OSError:
            return None
        if len(content) != FILE_BYTES:
            return None
        counter, pid = COUNTER.unpack_from(content)
        if counter == 0:
            return None
        start = COUNTER.size + SLOT_BYTES * (counter & 1)
        since, expected, length = SLOT.unpack_from(content, start)
        if not -1 <= length <= LONGEST:
            continue
        said = content[start + SLOT.size : start + SLOT.size + max(length, 0)]
        if checksum(since, said) == expected:
            text = None if length < 0 else said.decode(errors="replace")
            return Activity(text, since, pid)
        time.sleep(0)
    return None


def checksum(since: float, said: bytes) -> int:
    return zlib.crc32(said, zlib.crc32(struct.pack("=d", since)))
