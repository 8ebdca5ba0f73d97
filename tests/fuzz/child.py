"""A process that gives a reader broken inputs, and watches what it does.

python -m tests.fuzz.child READER SEED FIRST COUNT FOLDER [BASELINE] prints a line of JSON for each
failure, for progress, and at the end for the totals.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import traceback
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz.readers import READERS, Reader

#: Seconds of the processor's time after which a case hangs.
PATIENCE = 20.0
#: Address space beside the memory that a reader may take: threads, mapped files, the allocator.
SPACE = 1 << 30
LONGEST = 20_000
"""Characters of an error."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: Events of the interpreter that a reader of data has no reason for.
FORBIDDEN = (
    *("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork"),
    *("subprocess.Popen", "socket.connect", "ctypes.dlopen", "code.__new__", "webbrowser.open"),
)
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.chmod")
CHANGES += ("os.truncate", "shutil.rmtree", "os.utime", "os.chown")


class Watch:
    """An audit hook that notes what leaves the folder, or runs code."""

    def __init__(self) -> None:
        self.folder: str | None = None  # while a reader runs
        self.seen: list[str] = []
        sys.addaudithook(self.look)

    def look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in FORBIDDEN:
            self.seen.append(f"{event} {str(arguments)[:200]}")
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES:
            self.wrote(event, arguments[0])
        elif event in CHANGES:
            self.wrote(event, arguments[1] if event in ("os.symlink",) else arguments[0])

    def wrote(self, event: str, path: Any) -> None:
        if isinstance(path, int) or self.folder is None:
            return
        real = os.path.realpath(os.fsdecode(path))
        if not real.startswith(self.folder + os.sep) and real != os.devnull:
            self.seen.append(f"{event} outside of the folder: {real[:200]}")


class Hangs(BaseException):
    """A case takes longer than any should."""


def _stop(*_: Any) -> None:
    raise Hangs(f"more than {PATIENCE:.0f} s of the processor's time")


def check(reader: Reader, watch: Watch, case: Path) -> tuple[str, str, int]:
    """Run a reader on a case. **Returns**: how it ended, a problem or "", its peak of memory."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    watch.seen.clear()
    watch.folder = os.path.realpath(case)
    signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)
    ended, problem = "read", ""
    try:
        reader.read(case)
    except reader.errors as error:
        ended = "refused"
        problem = _wrong_text(str(error), reader)
    except BaseException as error:
        ended = "failed"
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.relpath(last.filename)}:{last.lineno}"
        problem = f"{type(error).__name__}: {error!s:.200} at {where}"
        if isinstance(error, KeyboardInterrupt):
            raise
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        watch.folder = None
    peak = tracemalloc.get_traced_memory()[1] - before
    if watch.seen and not problem:
        problem = watch.seen[0]
    if peak > reader.memory and not problem:
        problem = f"took {peak >> 20} MiB, more than {reader.memory >> 20}"
    return ended, problem, peak


def _wrong_text(text: str, reader: Reader) -> str:
    if not text.strip():
        return "an error without a text"
    if len(text) > LONGEST:
        return f"an error of {len(text)} characters"
    if reader.names and not any(name in text for name in reader.names):
        return f"an error that names neither file nor place: {text[:200]}"
    return ""


def make(reader: Reader, seed: int, number: int, folder: Path) -> Path:
    """Write a case: the same for a seed and a number."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    reader.make(random.Random(f"{reader.name} {seed} {number}"), folder)
    return folder


def main(name: str, seed: int, first: int, count: int, work: Path) -> None:
    # Readers that print do so elsewhere.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    reader, watch = READERS[name], Watch()
    case = work / "case"
    # The first uses import and cache: their files and memory do not count as a case's.
    for number in range(3):
        make(reader, 0, number, case)
        watch.folder = None
        try:
            reader.read(case)
        except Exception:
            pass
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    space = pages * resource.getpagesize() + SPACE + 2 * reader.memory
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    signal.signal(signal.SIGVTALRM, _stop)
    tracemalloc.start(1)
    ends: Counter[str] = Counter()
    most = 0
    for number in range(first, first + count):
        make(reader, seed, number, case)
        out.write(json.dumps({"at": number}) + "\n")
        out.flush()
        ended, problem, peak = check(reader, watch, case)
        ends[ended] += 1
        most = max(most, peak)
        if problem:
            out.write(json.dumps({"number": number, "problem": problem}) + "\n")
    out.write(json.dumps({"ends": ends, "peak": most}) + "\n")
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5]))
