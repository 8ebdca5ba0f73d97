"""Which tests run, and which of them make no progress: limits that a busy machine does not reach.

A test process writes the name of its test to a file. `Watch`, in the process that started pytest,
reads the files. A test hangs when its processes have hardly asked for the CPU for a minute in which
the machine ran: the time that they waited for a core counts as well, so a busy machine is not taken
for a hang, and a process that polls is. Its stacks are shown, those of forked ranks too; then its
processes are ended: first those that it started, so that the test fails with what it says itself,
then its own.

Nothing of this runs inside of the tests' processes, which must have no threads where they fork.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = os.environ.get("GPUSIM_TESTS_NOW", "")
TICK = 1.0  # seconds between two looks
QUIET = (
    60  # looks without progress, after which a test hangs: a machine that stalls is not looked at
)
LEAST = 0.1  # of a CPU, for QUIET looks: a process that polls asks for less
SPINNING = 1800.0  # CPU seconds, after which a test that is not done spins


def begins(name: str) -> None:
    """Note that this process begins a test."""
    if FOLDER:
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            stacks = open(Path(FOLDER) / "stacks", "a")
            faulthandler.register(signal.SIGUSR1, file=stacks)  # children that it forks have it too
        (Path(FOLDER) / str(os.getpid())).write_text(name)


def ends() -> None:
    """Note that this process runs no test."""
    if FOLDER:
        (Path(FOLDER) / str(os.getpid())).write_text("")


@dataclass
class Seen:
    """What `Watch` knows of the test that a process runs."""

    name: str
    at_begin: float  # CPU seconds of the process and its children
    at_last_progress: float  # those, and the seconds for which they waited for a core
    quiet: int = 0
    ended_children: bool = False


class Watch:
    """Looks at the tests of one pytest call. Owner: the thread that calls `look`, once a TICK."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: dict[int, Seen] = {}
        self.stopped: list[str] = []  # names of tests

    def look(self) -> None:
        tree = processes()
        for file in self.folder.iterdir():
            if file.name.isdigit():
                self._look_at(int(file.name), file.read_text(), tree)

    def _look_at(self, pid: int, name: str, tree: dict[int, Process]) -> None:
        below = descendants(pid, tree)
        own = [each for each in (pid, *below) if each in tree]
        used = sum(tree[each].seconds for each in own)
        seen = self.seen.get(pid)
        if not name or pid not in tree:
            self.seen.pop(pid, None)
        elif seen is None or seen.name != name:
            self.seen[pid] = Seen(name, used, used + sum(map(waited, own)))
        else:
            seen.quiet += 1
            asked = used + sum(map(waited, own))
            # Less than before: a child has ended whose time was not waited for, or a thread.
            if abs(asked - seen.at_last_progress) > LEAST * QUIET * TICK:
                seen.at_last_progress, seen.quiet = asked, 0
            spins = used - seen.at_begin > SPINNING
            if spins or seen.quiet >= QUIET:
                self._end(pid, below, seen, "spins" if spins else "hangs")

    def _end(self, pid: int, below: list[int], seen: Seen, how: str) -> None:
        """End what the test started; if that was done before, or nothing is there, the test."""
        print(f"\n== {seen.name} {how}; its processes:", flush=True)
        for each in (pid, *below):
            print(self._stacks(each), flush=True)
        self.stopped.append(seen.name)
        for each in below or [pid]:
            try:
                os.kill(pid if seen.ended_children else each, signal.SIGKILL)
            except ProcessLookupError:
                continue
        seen.ended_children, seen.quiet = True, 0

    def _stacks(self, pid: int) -> str:
        """The stacks of a process by py-spy, else by its faulthandler, else where it waits."""
        about = Path(f"/proc/{pid}")
        try:
            words = about.joinpath("cmdline").read_text().replace("\0", " ")[:300]
            caught = int(
                about.joinpath("status").read_text().partition("SigCgt:")[2].split()[0], 16
            )
        except OSError:
            return f"process {pid} has ended"
        head = f"-- process {pid}: {words}\n"
        command = [Path(sys.executable).with_name("py-spy"), "dump", "--pid", str(pid)]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=30,
                env={**os.environ, "PATH": path},
            )
            if done.returncode == 0:
                return head + done.stdout
        except (OSError, subprocess.TimeoutExpired):
            pass
        if caught >> (signal.SIGUSR1 - 1) & 1:
            stacks = self.folder / "stacks"
            before = stacks.stat().st_size if stacks.exists() else 0
            with suppress(OSError):  # it has just ended
                os.kill(pid, signal.SIGUSR1)
                time.sleep(TICK)
                return head + stacks.read_bytes()[before:].decode(errors="replace")
        with suppress(OSError):
            return head + "waits in " + about.joinpath("wchan").read_text()
        return f"process {pid} has ended"


@dataclass(frozen=True)
class Process:
    parent: int
    seconds: float  # of the CPU, with those of its children that have ended


def processes() -> dict[int, Process]:
    """Return all processes of this machine."""
    found = {}
    ticks = os.sysconf("SC_CLK_TCK")
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[int(file.parent.name)] = Process(int(fields[1]), sum(map(int, fields[11:15])) / ticks)
    return found


def waited(pid: int) -> float:
    """Return the seconds for which a process's threads could have run, and had no core."""
    found, folder = 0, Path(f"/proc/{pid}/task")
    with suppress(OSError):  # the process has just ended: Path.glob would fail, too
        for thread in os.listdir(folder):
            with suppress(OSError):  # a thread has
                found += int((folder / thread / "schedstat").read_text().split()[1])
    return found / 1e9


def descendants(pid: int, tree: dict[int, Process]) -> list[int]:
    """Return the processes below one."""
    found = [pid]
    for above in found:  # grows on the way
        found += [each for each, process in tree.items() if process.parent == above]
    return found[1:]
