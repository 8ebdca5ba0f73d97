"""Time on a machine that is shared: it may stand still for a minute, and nothing is late then.

`running` counts the seconds in which it ran; tests that say how soon something happens use it.
"""

from __future__ import annotations

import functools
import threading
import time

#: Seconds that a test waits for what ends by itself, before it calls it a hang.
PATIENCE = 300.0
TICK, LONGEST_TICK = 0.05, 0.25  # seconds; a longer one is a machine that stood still


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
    """Seconds in which this machine has run, since the first call."""
    return clock().seconds
