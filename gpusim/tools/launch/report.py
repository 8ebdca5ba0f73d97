"""poprun's last lines: the instance that failed, how it failed, and what all were doing.

The failure is found in mpirun's messages, the rest in the instances' heartbeats.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpusim.runtime.activity import ENDED, Activity

__all__ = ["Failure", "blocking_instance", "failure_in", "last_lines"]

# The messages of Open MPI 4 and 5, in one line; the first that matches counts.
PROCESS = r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node (?P<node>\S+)"
KILLED = re.compile(rf"{PROCESS} exited on signal (?P<signal>\d+)")
ABORTED = re.compile(rf"{PROCESS} calling")
IMPROPER = re.compile(rf"{PROCESS} exiting improperly")
EXITED = re.compile(r"Process name: \[\S*,(?P<rank>\d+)\]\S* Exit code: (?P<code>-?\d+)")

BLOCKED_TOGETHER = 5.0  # seconds for which all others wait for an instance that has ended


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


def failure_in(messages: str, code: int) -> Failure | None:
    """The first failure that mpirun's messages name, if any.

    `code` is mpirun's exit code, which is the instance's.

    >>> failure_in("prterun noticed that process rank 1 with PID 7 on node\\nvm exited on\\n"
    ...            "signal 9 (Killed).", 137)
    Failure(instance=1, how='was killed by SIGKILL', pid=7, node='vm')
    """
    line = " ".join(messages.split())
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
    """The heading where mpirun names no instance: if one dies in MPI_Init, or mpirun is killed.

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


def blocking_instance(
    activities: Mapping[int, Activity], instances: int, now: float
) -> Failure | None:
    """An instance that has ended its program while all others are blocked for some seconds.

    MPI_Finalize waits for all instances, so this one would hang with them.
    """
    if len(activities) < instances or not all(found.text for found in activities.values()):
        return None
    ended = [instance for instance, found in activities.items() if found.text == ENDED]
    newest = max(found.since for found in activities.values())
    if not 0 < len(ended) < instances or now - newest < BLOCKED_TOGETHER:
        return None
    first = min(ended, key=lambda instance: activities[instance].since)
    how = "ended its program while the others wait for it"
    return Failure(first, how, activities[first].pid)


def last_lines(
    heading: str,
    failure: Failure | None,
    activities: Mapping[int, Activity],
    instances: int,
    end: float,
) -> Iterator[str]:
    """The report of a failed run: the instance that failed, then what each was doing.

    `end` is the time at which poprun noticed the failure, as `time.time()`.
    """
    yield f"{failure.who} {failure.how}" if failure else heading
    order = sorted(range(instances), key=lambda i: (failure is None or i != failure.instance, i))
    for instance in order if activities else ():
        yield f"  instance {instance} {describe(activities.get(instance), end)}"


def describe(found: Activity | None, end: float) -> str:
    if found is None:
        return "has not yet used gpusim's collectives"
    seconds = max(0.0, end - found.since)
    since = f"since {time.strftime('%H:%M:%S', time.localtime(found.since))}, for {seconds:.1f} s"
    return f"was {f'in {found.text}' if found.text else 'running code of its own'} ({since})"
