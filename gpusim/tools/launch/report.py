"""Which instance failed, how, and what all of them were doing: poprun's last lines.

How is read from what mpirun says; what they did, from their notes.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpusim.runtime.activity import ENDED, Activity

__all__ = ["Failure", "failure_in", "last_lines", "left_alone"]

# What Open MPI 4 and 5 say, in one line; the first that fits counts.
PROCESS = r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node (?P<node>\S+)"
KILLED = re.compile(rf"{PROCESS} exited on signal (?P<signal>\d+)")
ABORTED = re.compile(rf"{PROCESS} calling")
IMPROPER = re.compile(rf"{PROCESS} exiting improperly")
EXITED = re.compile(r"Process name: \[\S*,(?P<rank>\d+)\]\S* Exit code: (?P<code>-?\d+)")

BLOCKED_TOGETHER = 5.0  # seconds that all others wait for one that has ended its program


@dataclass(frozen=True)
class Failure:
    """The instance that failed first, and how."""

    instance: int
    how: str
    pid: int = 0
    node: str = ""

    @property
    def who(self) -> str:
        where = " on ".join(filter(None, (f"pid {self.pid}" if self.pid else "", self.node)))
        return f"instance {self.instance}" + (f" ({where})" if where else "")


def failure_in(said: str, code: int) -> Failure | None:
    """What mpirun says about the first instance that failed; None if it names none.

    `code` is mpirun's own exit code, that of the instance.

    >>> failure_in("prterun noticed that process rank 1 with PID 7 on node\\nvm exited on\\n"
    ...            "signal 9 (Killed).", 137)
    Failure(instance=1, how='was killed by SIGKILL', pid=7, node='vm')
    """
    line = " ".join(said.split())
    for pattern, how in (
        (KILLED, lambda match: f"was killed by {signal_name(int(match['signal']))}"),
        (ABORTED, lambda match: f"ended the run with exit code {code}"),
        (IMPROPER, lambda match: "ended without MPI_Finalize"),
        (EXITED, lambda match: f"exited with code {match['code']}"),
    ):
        if match := pattern.search(line):
            found = match.groupdict()
            pid, node = int(found.get("pid") or 0), found.get("node") or ""
            return Failure(int(match["rank"]), how(match), pid, node)
    return None


def unnamed(code: int, *, mpirun: bool = False) -> str:
    """What can be said where mpirun names no instance: one dies while it starts MPI, or it is
    mpirun itself that was killed.

    >>> unnamed(137)
    'an instance was killed by SIGKILL; mpirun does not say which (exit code 137)'
    >>> unnamed(213)
    'mpirun ended with exit code 213'
    """
    if not mpirun and code - 128 in [*signal.Signals]:
        killer = signal_name(code - 128)
        return f"an instance was killed by {killer}; mpirun does not say which (exit code {code})"
    return f"mpirun ended with exit code {code}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def left_alone(notes: Mapping[int, Activity], instances: int, now: float) -> Failure | None:
    """An instance that has ended its program while all others are blocked, and stay so.

    MPI_Finalize waits for all, so one that raised or called sys.exit would hang with them.
    """
    if len(notes) < instances or not all(note.text for note in notes.values()):
        return None
    ended = [instance for instance, note in notes.items() if note.text == ENDED]
    newest = max(note.since for note in notes.values())
    if not 0 < len(ended) < instances or now - newest < BLOCKED_TOGETHER:
        return None
    first = min(ended, key=lambda instance: notes[instance].since)
    how = "ended its program while the others wait for it"
    return Failure(first, how, notes[first].pid)


def last_lines(
    heading: str, failure: Failure | None, notes: Mapping[int, Activity], instances: int, end: float
) -> Iterator[str]:
    """What to print when a run has failed: the instance, then what each was doing.

    `end` is when that was noticed, as `time.time()`.
    """
    yield f"{failure.who} {failure.how}" if failure else heading
    order = sorted(range(instances), key=lambda i: (failure is None or i != failure.instance, i))
    for instance in order if notes else ():
        yield f"  instance {instance} {doing(notes.get(instance), end)}"


def doing(note: Activity | None, end: float) -> str:
    if note is None:
        return "has not yet used gpusim's collectives"
    seconds = max(0.0, end - note.since)
    since = f"since {time.strftime('%H:%M:%S', time.localtime(note.since))}, for {seconds:.1f} s"
    return f"was {f'in {note.text}' if note.text else 'running code of its own'} ({since})"
