"""A heartbeat file for each instance, which says what the instance is doing.

A launcher names a folder with $GPUSIM_ACTIVITY, and reads it when an instance is gone or a run
hangs. Without the variable nothing is written.
"""

from __future__ import annotations

import atexit
import os
import re
import struct
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpusim.platforms import PLAIN, after_fork
from gpusim.runtime import environment

__all__ = ["ENDED", "FOLDER", "Activity", "is_free", "note", "note_end", "read", "repeat"]

FOLDER = "GPUSIM_ACTIVITY"  # the variable that names the folder
ENDED = "the end of its program, waiting for the others to end too"  # in MPI_Finalize

NAME = re.compile(r"instance-(\d+)")
CHECKSUM = struct.Struct("=I")
HEADER = struct.Struct("=dqi")  # time, process id, length of the text (-1 for None)
MAX_TEXT = 2000  # bytes
READ_ATTEMPTS = 100  # while the instance writes

_last: tuple[str, float] | None = None  # what this instance blocked in last
_blocked = False
_file: int | None = None
_opened = False


@dataclass(frozen=True)
class Activity:
    """The activity of an instance at its last heartbeat.

    **Arguments**

    - `text`: the call that blocks it; None while it runs code of its own.
    - `since`: the time of the heartbeat, as `time.time()`.
    - `pid`: its process.
    """

    text: str | None
    since: float
    pid: int


def note(text: str | None) -> None:
    """Write what this instance is about to block in; None when it goes on.

    Never raises: a full disk or a missing folder ends the heartbeats, not the program.
    """
    global _last, _blocked
    now, _blocked = time.time(), text is not None
    if text is not None:
        _last = text, now
    write(text, now)


def note_end(how: str = "") -> None:
    """Write that the program has ended, and how."""
    write(ENDED + how, time.time())


def repeat() -> None:
    """Write again what this instance blocked in last, with the time at which it began."""
    if _last is not None:
        write(*_last)


def is_free() -> bool:
    """Whether the instance runs code of its own."""
    return not _blocked


def write(text: str | None, since: float) -> None:
    global _file, _opened
    if not _opened:
        _file, _opened = open_file(), True
    if _file is None:
        return
    content = b"" if text is None else text[:MAX_TEXT].encode(errors="replace")[:MAX_TEXT]
    length = -1 if text is None else len(content)
    record = HEADER.pack(since, os.getpid(), length) + content
    with suppress(OSError):
        os.pwrite(_file, CHECKSUM.pack(zlib.crc32(record)) + record, 0)


def read(folder: str | os.PathLike[str]) -> dict[int, Activity]:
    """The last heartbeats, by instance; empty without a folder."""
    found = {}
    with suppress(OSError):
        for path in Path(folder).iterdir():
            match = NAME.fullmatch(path.name)
            if match and (activity := last_heartbeat(path)):
                found[int(match[1])] = activity
    return dict(sorted(found.items()))


def open_file() -> int | None:
    """The heartbeat file of this process; None if it has none."""
    folder = os.environ.get(FOLDER)
    if not folder or not hasattr(os, "pwrite"):  # poprun does not start Windows's processes
        return None
    flags = os.O_WRONLY | os.O_CREAT | PLAIN
    try:
        file = os.open(Path(folder) / f"instance-{environment.read().instance}", flags, 0o600)
    except (OSError, ValueError):
        return None
    atexit.register(note_end)
    return file


def last_heartbeat(path: Path) -> Activity | None:
    """The content of a heartbeat file; None if it is empty or not such a file.

    The checksum tells a heartbeat from one that is half overwritten by the next.
    """
    for _ in range(READ_ATTEMPTS):
        try:
            with path.open("rb") as file:
                content = file.read(CHECKSUM.size + HEADER.size + MAX_TEXT)
            (checksum,) = CHECKSUM.unpack_from(content)
            since, pid, length = HEADER.unpack_from(content, CHECKSUM.size)
        except (OSError, struct.error):
            return None
        record = content[CHECKSUM.size :][: HEADER.size + max(length, 0)]
        if checksum == zlib.crc32(record):
            text = record[HEADER.size :].decode(errors="replace") if length >= 0 else None
            return Activity(text, since, pid)
        time.sleep(0)
    return None


def forget() -> None:
    """Keep a forked child, which is not the instance, from writing."""
    global _file, _opened
    _file, _opened = None, True


after_fork(forget)
