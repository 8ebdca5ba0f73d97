"""Ends processes of a run that would otherwise stay behind or wait for ever.

This file is also a script, which outlives the process that it watches and imports nothing else:

    python -I -S reaper.py run FOLDER < PIPE           kills what a failed poprun leaves
    python -I -S reaper.py start PID LAUNCHER COUNT    watches the instances while MPI starts

While MPI starts, it waits for all processes, including those that have ended without MPI: mpirun
takes such a process for a good one. Python's threads stand still meanwhile, so another process has
to watch. If an instance dies while it connects, mpirun itself may wait for ever.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["start_reaper", "start_time", "watching_start"]

FOLDER = "GPUSIM_ACTIVITY"  # in the environment of all processes of a run of poprun
RANK, LOCAL_SIZE = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
SIZE = "OMPI_COMM_WORLD_SIZE"
SESSION = "PMIX_SERVER_TMPDIR"  # the folder of an mpirun: ompi.PID, prte.HOST.PID.UID
MPIRUN = ("mpirun", "mpiexec", "prterun")  # not prted, which does not end with its instances

POLL = 0.25  # seconds
MISSING_POLLS = 8  # without some instance; mpirun ends all instances if one was killed
EMPTY_POLLS = 12  # of an mpirun that has no instance left and does not end
MPIRUN_PATIENCE = 3.0  # seconds for an mpirun to end its instances
KILL_ROUNDS = 20  # a process may start another one meanwhile


def start_reaper(folder: str) -> subprocess.Popen[bytes]:
    """Start the reaper of a run of poprun.

    It waits for the end of its standard input. Unless something was written, it kills the processes
    that the run has left on this host, and removes the folder.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, "run", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # signals to poprun's process group must not reach it
    )


@contextmanager
def watching_start() -> Iterator[None]:
    """End this process if another instance on this host ends meanwhile."""
    count = os.environ.get(LOCAL_SIZE, "")
    if not count.isdigit() or int(count) < 2 or "mpi4py.MPI" in sys.modules:
        yield
        return
    pid = os.getpid()
    watch = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, "start", str(pid), str(launcher_of(pid)), count],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != RANK},  # no instance
        start_new_session=True,  # mpirun ends whole process groups
    )
    try:
        yield
    finally:
        watch.kill()
        watch.wait()


# ---------------------------------------------------------------- after poprun


def clear_up(folder: str) -> None:
    """Kill the processes of a run, after poprun's end or failure."""
    if sys.stdin.buffer.read():
        return  # the run has succeeded: what it left in the background is left alone
    mpiruns = [pid for pid in processes_of(folder) if name_of(pid) in MPIRUN]
    kill(mpiruns, signal.SIGTERM)  # which removes its own files, and reaches other hosts
    deadline = time.monotonic() + MPIRUN_PATIENCE
    while any(map(start_time, mpiruns)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for _ in range(KILL_ROUNDS):
        remaining = processes_of(folder)
        kill(remaining, signal.SIGKILL)
        if not remaining:
            break
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: str) -> list[int]:
    """The processes of a run, except this one."""
    mark = f"{FOLDER}={folder}"
    return [pid for pid in processes() if pid != os.getpid() and mark in environment_of(pid)]


def kill(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:  # it has ended
            continue


# ---------------------------------------------------------------- while MPI starts


def watch_start(instance: int, launcher: int, count: int) -> None:
    """Watch the instances of this host until the one that asked for it goes on, or ends."""
    started = start_time(launcher)
    visible = watch_instances(instance, launcher, count)
    if visible and count == int(os.environ.get(SIZE, 0)):  # else other hosts may be at work
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # mpirun waits for the end of its stderr
        end_launcher(launcher, started)


def watch_instances(instance: int, launcher: int, count: int) -> bool:
    """Return when the instance has ended, and kill it if others have ended before.

    Returns whether it is visible among the processes of the launcher.
    """
    rank = rank_of(instance)
    visible = False
    missed = 0
    while os.getppid() == instance:
        ranks = ranks_below(launcher)
        time.sleep(POLL)
        if rank is None or rank not in ranks:
            continue
        visible = True
        missed = missed + 1 if len(ranks) < count else 0
        if missed == MISSING_POLLS and rank == min(ranks, key=int):
            waiting = f"instance {rank} waits" if len(ranks) == 1 else "the others wait"
            print(
                f"gpusim: {count - len(ranks)} of {count} instances on this host ended without "
                f"joining: {waiting} in World.from_environment, which all must call",
                file=sys.stderr,
                flush=True,
            )
            os.kill(instance, signal.SIGKILL)  # in MPI_Init it ignores every other signal
    return visible


def end_launcher(launcher: int, started: str) -> None:
    """Kill an mpirun that waits though it has no instance left, and remove its session folder.

    A later mpirun with the same process id would not start in that folder.
    """
    empty = 0
    while started and start_time(launcher) == started:
        empty = 0 if ranks_below(launcher) else empty + 1
        if empty == EMPTY_POLLS and name_of(launcher) in MPIRUN:
            os.kill(launcher, signal.SIGKILL)
            session = os.environ.get(SESSION, "")
            if str(launcher) in Path(session).name.split("."):
                shutil.rmtree(session, ignore_errors=True)
            return
        time.sleep(POLL)


def launcher_of(pid: int) -> int:
    """The nearest ancestor that is not an instance, nor a shell in which an instance runs."""
    while rank_of(pid) is not None:
        pid = parent_of(pid)
    return pid


def ranks_below(launcher: int) -> set[str]:
    """The ranks of the launcher's instances on this host."""
    ranks = {rank_of(pid) for pid in processes() if parent_of(pid) == launcher}
    return {rank for rank in ranks if rank is not None}


def rank_of(pid: int) -> str | None:
    """The rank in the environment of a process; None without one, or if the process has ended."""
    for variable in environment_of(pid):
        name, _, value = variable.partition("=")
        if name == RANK and value.isdigit():
            return value
    return None


# ---------------------------------------------------------------- /proc


def processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def environment_of(pid: int) -> list[str]:
    """Empty if the process has ended, or belongs to another user."""
    return read(f"/proc/{pid}/environ").split("\0")


def name_of(pid: int) -> str:
    return read(f"/proc/{pid}/comm").strip()


def parent_of(pid: int) -> int:
    """0 if the process has ended."""
    stat = stat_of(pid)
    return int(stat[1]) if stat else 0


def start_time(pid: int) -> str:
    """The start, which a later process with the same id does not share; empty if it has ended."""
    stat = stat_of(pid)
    return stat[19] if stat and stat[0] != "Z" else ""


def stat_of(pid: int) -> list[str]:
    """State, parent and so on, as in proc(5); empty if the process has ended."""
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


if __name__ == "__main__":
    if sys.argv[1] == "run":
        clear_up(sys.argv[2])
    else:
        watch_start(*map(int, sys.argv[2:5]))
