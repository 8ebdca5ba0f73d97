"""Time on a shared machine, which may stall for a minute.

`running` counts only the seconds in which the machine runs. Tests that bound a duration use it.
"""

from __future__ import annotations

import functools
import threading
import time

#: Seconds after which a test regards a process that should end by itself as hung.
PATIENCE = 300.0
TICK, LONGEST_TICK = 0.05, 0.25  # seconds; after a longer tick the machine was stalled


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0
        threading.Thread(target=self._tick, name="machine time", daemon=True).start()

    def _tick(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(TICK)
            now = time.monotonic()
            self.seconds += min(now - last, LONGEST_TICK)
            last = now


@functools.cache
def clock() -> Clock:
    return Clock()


def running() -> float:
    """Return the seconds in which this machine has run since the first call."""
    return clock().seconds
