"""While MPI starts it waits for all processes, also for those that have ended without it.

mpirun takes such a process for a good one, so the others look after it: by a script of its own,
python -I starting.py PROCESS LAUNCHER COUNT, as Python's threads stand still meanwhile. It also
outlives its process: if that ends while it connects, mpirun may wait for itself forever (its
library keeps a lock then), with all instances gone.
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
LAST_LOOKS = 12  # in which mpirun had no process any more, and did not end
RANK, COUNT = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
ALL = "OMPI_COMM_WORLD_SIZE"
MPIRUN = ("mpirun", "mpiexec", "prterun")  # those that end with what they started; prted does not


@contextmanager
def watching_start() -> Iterator[None]:
    """End this process if, meanwhile, one that mpirun started beside it has ended."""
    count = os.environ.get(COUNT, "")
    if not count.isdigit() or int(count) < 2 or "mpi4py.MPI" in sys.modules:
        yield
        return
    above = launcher(os.getpid())
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(above), count]
    watch = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != RANK},  # no instance
        start_new_session=True,  # mpirun ends whole groups of processes
    )
    try:
        yield
    finally:
        watch.kill()
        watch.wait()


def main(process: int, above: int, count: int) -> None:
    """Look at the processes of this host until the one that asked for it goes on, or ends."""
    began = beginning_of(above)
    seen = wait_with(process, above, count)
    if seen and count == int(os.environ.get(ALL, 0)):  # elsewhere there may be some at work
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # mpirun waits for the end of it
        end_launcher(above, began)


def wait_with(process: int, above: int, count: int) -> bool:
    """Return once the process has ended, and end it if others have; whether they can be seen."""
    own = rank_of(process)
    seen = False
    missed = 0
    while os.getppid() == process:
        there = beside(above)
        time.sleep(LOOK_EVERY)
        if own is None or own not in there:
            continue
        seen = True
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
    return seen


def end_launcher(above: int, began: str) -> None:
    """Kill an mpirun that has nothing left to wait for; it would hear nothing else."""
    empty = 0
    while began and beginning_of(above) == began:
        empty = 0 if beside(above) else empty + 1
        if empty == LAST_LOOKS and read(Path(f"/proc/{above}/comm")).strip() in MPIRUN:
            os.kill(above, signal.SIGKILL)
            return
        time.sleep(LOOK_EVERY)


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
    stat = stat_of(pid)
    return int(stat[1]) if stat else 0


def beginning_of(pid: int) -> str:
    """What tells a process from a later one of the same number; nothing if it has ended."""
    stat = stat_of(pid)
    return stat[19] if stat and stat[0] != "Z" else ""


def stat_of(pid: int) -> list[str]:
    """State, parent and so on, as proc(5) lists them; nothing if the process has ended."""
    return read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


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
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
