"""Whether something goes on: the seconds of work of a process and of what it has started.

A thread that waits for a core, or for a disk, works too. So on a busy machine these seconds go on,
and those of a thread that waits for another do not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ....maps.clock import Work

__all__ = ["Stillness", "work_of_process"]

STILL = 0.5
"""Seconds after which a process that does nothing counts as blocked."""


def work_of_process(process: int, without: Collection[int] = ()) -> Work | None:
    """The work of all threads of a process, and of those that it has started.

    `without` are threads that do not count, by the system's numbers.

    **Returns**: None where the system does not say so.
    """
    total, known, goes_on = 0.0, False, False
    for each in _family(process):
        for task in _threads(each):
            if int(task.name) in without:
                continue
            with suppress(OSError, ValueError, IndexError):
                ran, waited, _ = map(int, (task / "schedstat").read_text().split())
                total += (ran + waited) / 1e9
                known = True
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                # On a core, or waiting for one or for a disk. The system adds a wait for a core to
                # the sum only when it is over, which on a busy machine takes long.
                goes_on = goes_on or state in "RD"
    return Work(total, goes_on, time.monotonic()) if known else None


class Stillness:
    """How long a process has done nothing. It is asked again and again."""

    def __init__(self, process: Any) -> None:
        self._number: int | None = getattr(process, "pid", None)
        self._since, self._work = time.monotonic(), 0.0

    def is_blocked(self) -> bool:
        """Whether the process has done nothing for `STILL` seconds; False if that is unknown."""
        now = time.monotonic()
        work = None if self._number is None else work_of_process(self._number)
        if work is None:
            return False
        if work.goes_on or work.seconds - self._work > (now - self._since) / 2:
            self._since, self._work = now, work.seconds
        return now - self._since > STILL


def _threads(process: int) -> list[Path]:
    """The folders of a process's threads; none of one that has ended, which may be just now."""
    folder = f"/proc/{process}/task"
    # Not Path.glob: it looks whether the folder is there, and fails if that is true no longer.
    try:
        return [Path(folder, name) for name in os.listdir(folder)]
    except OSError:
        return []


def _family(process: int) -> Iterator[int]:
    """A process, and those that it and its own have started."""
    yield process
    for task in _threads(process):
        children: list[str] = []
        with suppress(OSError):
            children = (task / "children").read_text().split()
        for child in children:
            yield from _family(int(child))
