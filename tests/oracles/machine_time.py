"""Waiting on a shared machine, which may stall for minutes: it is slow then, not wrong.

Tests wait for events, and bound no duration. `python -m tests` ends what makes no progress.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

#: Seconds, a bound for runs without the watcher: `python -m tests` ends what makes no progress.
PATIENCE = 3600.0
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.25  # seconds; a watcher must see that a hang uses no CPU
LOOKS = 1200  # some five minutes, in which the machine ran


def until(condition: Callable[[], object]) -> bool:
    """Wait for the condition; False if it is not true in `LOOKS` looks."""
    pause = FIRST_PAUSE
    for _ in range(LOOKS):
        if condition():
            return True
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return False


def seconds_of_work(process: int) -> float:
    """Return the seconds in which its threads had a core, or waited for one or for a disk.

    On a busy machine these go on, and those of a process that is blocked do not.
    """
    found = 0.0
    for task in Path(f"/proc/{process}/task").glob("*"):
        with contextlib.suppress(OSError):
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":  # it has ended
                ran, waited, _ = map(int, (task / "schedstat").read_text().split())
                found += (ran + waited) / 1e9 + 1e-9
            if state == "D":
                found += time.monotonic()  # which goes on as well
    return found


def blocked(process: int, looks: int = 4, pause: float = 0.1) -> bool:
    """Wait until a process does nothing in so many looks; False if it ends instead."""
    idle, before = 0, 0.0
    while idle < looks:
        time.sleep(pause)
        now = seconds_of_work(process)
        if not now:
            return False
        idle, before = (idle + 1 if now - before < pause / 20 else 0), now
    return True
