"""While MPI starts it waits for all processes, also for those that have ended without it.

mpirun takes such a process for a good one; so the others look after it themselves.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

__all__ = ["watching_start"]

LOOK_EVERY = 0.25  # seconds
# Looks at a process that is gone before this one ends: mpirun ends all if it was killed.
LOOKS = 4
RANK, COUNT = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"


@contextmanager
def watching_start() -> Iterator[None]:
    """End this process if, meanwhile, a process that mpirun started beside it ends."""
    started = threading.Event()
    count = os.environ.get(COUNT, "")
    if count.isdigit() and int(count) > 1:
        threading.Thread(
            target=watch, args=(int(count), started), name="gpusim start", daemon=True
        ).start()
    try:
        yield
    finally:
        started.set()


def watch(count: int, started: threading.Event) -> None:
    """Look at the processes of this host until MPI has started here."""
    seen: dict[int, str] = {}
    gone = 0
    while not started.wait(LOOK_EVERY):
        if len(seen) < count:
            seen |= beside(os.getppid())
            continue
        ended = [instance for pid, instance in seen.items() if not lives(pid)]
        gone = gone + 1 if ended else 0
        if gone >= LOOKS:
            which = "instance " if len(ended) == 1 else "instances "
            text = (
                f"gpusim: {which}{', '.join(sorted(ended, key=int))} ended without joining the "
                f"others, and instance {os.environ[RANK]} waits for it in World.from_environment, "
                "which all instances must call\n"
            )
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
            os._exit(1)


def beside(parent: int) -> Mapping[int, str]:
    """The instances that mpirun has started on this host, by process."""
    found = {}
    for path in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in words(path, " "):
            for variable in words(Path(f"/proc/{pid}/environ"), "\0"):
                name, _, value = variable.partition("=")
                if name == RANK and value.isdigit():
                    found[int(pid)] = value
    return found


def words(path: Path, separator: str) -> list[str]:
    try:
        return [w for w in path.read_text(errors="replace").split(separator) if w]
    except OSError:
        return []


def lives(pid: int) -> bool:
    """Whether a process is there, and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"
