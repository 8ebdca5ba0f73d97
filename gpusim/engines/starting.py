"""While MPI starts it waits for all processes, also for those that have ended without it.

mpirun takes such a process for a good one, so the others look after it: by a script of its own,
python -I starting.py PROCESS COUNT, as Python's threads stand still meanwhile.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["watching_start"]

LOOK_EVERY = 0.25  # seconds
LOOKS = 8  # in which some process was missing; mpirun ends all if it was killed
RANK, COUNT = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"


@contextmanager
def watching_start() -> Iterator[None]:
    """End this process if, meanwhile, one that mpirun started beside it has ended."""
    count = os.environ.get(COUNT, "")
    if not count.isdigit() or int(count) < 2 or "mpi4py.MPI" in sys.modules:
        yield
        return
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), count]
    watch = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        watch.kill()
        watch.wait()


def main(process: int, count: int) -> None:
    """Look at the processes of this host until the one that asked for it goes on."""
    own = rank_of(process)
    missed = 0
    while os.getppid() == process:
        time.sleep(LOOK_EVERY)
        there = beside(launcher(process))
        if own is None or own not in there:  # they cannot be seen
            return
        missed = missed + 1 if len(there) < count else 0
        if missed == LOOKS and own == min(there, key=int):
            waiting = f"instance {own} waits" if len(there) == 1 else "the others wait"
            print(
                f"gpusim: {count - len(there)} of {count} instances on this host ended without "
                f"joining: {waiting} in World.from_environment, which all must call",
                file=sys.stderr,
                flush=True,
            )
            os.kill(process, signal.SIGKILL)  # it would hear nothing else


def launcher(pid: int) -> int:
    """The nearest process above one that is no instance, nor a shell that is to run one."""
    while rank_of(pid) is not None:
        pid = parent_of(pid)
    return pid


def beside(parent: int) -> set[str]:
    """The instances that a launcher has on this host."""
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    ranks = {rank_of(pid) for pid in pids if parent_of(pid) == parent}
    return {rank for rank in ranks if rank is not None}


def parent_of(pid: int) -> int:
    """0 if the process has ended."""
    stat = read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(stat[1]) if stat else 0


def rank_of(pid: int) -> str | None:
    """What the environment of a process says; None if it says nothing, or the process has ended."""
    for variable in read(Path(f"/proc/{pid}/environ")).split("\0"):
        name, _, value = variable.partition("=")
        if name == RANK and value.isdigit():
            return value
    return None


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
