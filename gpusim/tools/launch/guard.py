"""Clears up after a poprun that was killed: a script of its own, which outlives it.

    python -I guard.py FOLDER < PIPE

Waits for the end of PIPE, whose other end poprun alone holds. If nothing was written into it,
ends what the run has left on this host, and removes its folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER = "GPUSIM_ACTIVITY"  # as in gpusim.runtime.activity, which is too large to import here
PATIENCE = 3.0  # seconds for mpirun, which was told of its parent's death, to end the instances
ROUNDS = 20  # of killing: a process may start another meanwhile


def left(folder: str) -> Iterator[int]:
    """The processes, except this, that have the folder in their environment."""
    marker = os.fsencode(f"{FOLDER}={folder}")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environ = (entry / "environ").read_bytes()
        except OSError:  # it has ended, or is another user's
            continue
        if marker in environ.split(b"\0") and int(entry.name) != os.getpid():
            yield int(entry.name)


def sweep(folder: str) -> None:
    """Kill them all."""
    for _ in range(ROUNDS):
        found = list(left(folder))
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        if not found:
            return
        time.sleep(0.02)


def main(folder: str) -> None:
    if os.read(0, 1):
        return  # poprun has cleared up itself
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and any(left(folder)):
        time.sleep(0.1)
    sweep(folder)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
