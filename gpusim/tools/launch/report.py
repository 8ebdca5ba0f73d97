"""poprun's last lines: the instance that failed, how and where, and what the others were doing.

The failure is found in mpirun's messages, the errors in what the instances have written, the rest
in their heartbeats.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpusim.runtime.activity import ENDED, Activity
from gpusim.tools.launch.crashes import Crash

__all__ = ["Failure", "Run", "blocking_instance", "culprit", "failure_in", "last_lines", "unnamed"]

# The messages of Open MPI 4 and 5, in one line; the first that matches counts.
PROCESS = r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node (?P<node>\S+)"
KILLED = re.compile(rf"{PROCESS} exited on signal (?P<signal>\d+)")
ABORTED = re.compile(rf"{PROCESS} calling")
IMPROPER = re.compile(rf"{PROCESS} exiting improperly")
EXITED = re.compile(r"Process name: \[\S*,(?P<rank>\d+)\]\S* Exit code: (?P<code>-?\d+)")

# The instance that an InstanceError names, and how it ended.
NAMED = re.compile(r"InstanceError: instance (\d+)(?: \([^)]*\))? (?P<how>[^;]+)")
AFTER = "its end, after "  # in the heartbeat of an instance that failed
MOST_LINES, MOST_CHARACTERS = 12, 200  # of the culprit's traceback

BLOCKED_TOGETHER = 5.0  # seconds for which all others wait for an instance that has ended


@dataclass(frozen=True)
class Failure:
    """The instance that failed first, and how."""

    instance: int
    how: str
    pid: int = 0
    node: str = ""
    code: int = 0  # if it exited with one

    @property
    def who(self) -> str:
        where = " on ".join(filter(None, (f"pid {self.pid}" if self.pid else "", self.node)))
        return f"instance {self.instance}" + (f" ({where})" if where else "")


def failure_in(messages: str, code: int) -> Failure | None:
    """The first failure that mpirun's messages name, if any.

    `code` is mpirun's exit code, which is the instance's.

    >>> failure_in("prterun noticed that process rank 1 with PID 7 on node\\nvm exited on\\n"
    ...            "signal 9 (Killed).", 137)
    Failure(instance=1, how='was killed by SIGKILL', pid=7, node='vm', code=0)
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
            exited = int(found.get("code") or 0)
            return Failure(int(match["rank"]), how(match), pid, node, exited)
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
    ended = [
        instance for instance, found in activities.items() if str(found.text).startswith(ENDED)
    ]
    newest = max(found.since for found in activities.values())
    if not 0 < len(ended) < instances or now - newest < BLOCKED_TOGETHER:
        return None
    first = min(ended, key=lambda instance: activities[instance].since)
    how = "ended its program while the others wait for it"
    return Failure(first, how, activities[first].pid)


@dataclass(frozen=True)
class Run:
    """The facts known of a failed run.

    **Arguments**:

    - `instances`: their number.
    - `crashes`: the uncaught errors, by instance.
    - `activities`: what the instances were doing when it failed.
    - `end`: when poprun noticed the failure, as `time.time()`.
    """

    instances: int
    crashes: Mapping[int, Crash]
    activities: Mapping[int, Activity]
    end: float


def culprit(failure: Failure | None, crashes: Mapping[int, Crash]) -> int | None:
    """The instance that failed first; the others' errors, and mpirun's exit code, may follow."""
    if failure and (failure.instance not in crashes or not failure.how.startswith("exited")):
        return failure.instance
    alike: dict[tuple[str, str], list[int]] = {}
    for instance, crash in crashes.items():
        if crash.kind != "InstanceError":
            alike.setdefault((crash.kind, crash.place), []).append(instance)
    if alike:
        here = failure.instance if failure else -1
        fewest = min(alike.values(), key=lambda found: (len(found), here not in found, found))
        return here if here in fewest else fewest[0]
    for crash in crashes.values():
        if match := NAMED.search(crash.error):
            return int(match[1])
    return None


def last_lines(heading: str, failure: Failure | None, run: Run) -> Iterator[str]:
    """The report of a failed run: the instance that failed, then what the others were doing."""
    first = culprit(failure, run.crashes)
    crash = None if first is None else run.crashes.get(first)
    if first is None:
        yield heading
    else:
        yield f"{who(first, failure)} {_how(first, failure, run)}"
        for line in _shortened([*crash.message.splitlines()[1:], *crash.frames]) if crash else ():
            yield f"    {line}"
        if crash is None and (found := run.activities.get(first)) and not _is_end(found):
            yield f"  instance {first} was {describe(found, run.end)}"
    doings: dict[tuple[str, str], list[int]] = {}
    for instance in range(run.instances):
        if instance != first and (run.activities or run.crashes):
            doings.setdefault(_doing(instance, first, run), []).append(instance)
    for (verb, text), alike in doings.items():
        since = [run.activities[i] for i in alike if i in run.activities]
        if verb == "was" and since:
            text = describe(min(since, key=lambda activity: activity.since), run.end)
        verb = {"was": "were", "has": "have"}.get(verb, verb) if len(alike) > 1 else verb
        yield f"  {names(alike)} {verb} {text}"


def who(instance: int, failure: Failure | None) -> str:
    return failure.who if failure and failure.instance == instance else f"instance {instance}"


def _how(instance: int, failure: Failure | None, run: Run) -> str:
    """How the instance that failed first has ended."""
    crash, found = run.crashes.get(instance), run.activities.get(instance)
    own = failure is not None and failure.instance == instance
    if own and failure and not failure.how.startswith("exited"):
        at = f" at {crash.place}" if crash and crash.place else ""
        ended = found and found.text and found.text.startswith(ENDED)
        by = found.text.removeprefix(ENDED) if found and found.text and ended else ""
        return f"{failure.how}{by}{at}"
    if crash:
        at = f" at {crash.place}" if crash.place else ""
        return f"failed{at}: {crash.message.splitlines()[0]}"
    named = [match for other in run.crashes.values() if (match := NAMED.search(other.error))]
    how = next((match["how"] for match in named if int(match[1]) == instance), "")
    if how and (not own or how.startswith("has ended")):
        return f"{how} while the others wait for it"
    if own and failure:
        if found and found.text and found.text.startswith(AFTER):
            return f"{failure.how}, after {found.text.removeprefix(AFTER)}"
        return failure.how
    raise AssertionError(f"instance {instance} has not failed")


def _doing(instance: int, first: int | None, run: Run) -> tuple[str, str]:
    """The last act of an instance, or how it failed after the first, as a verb and a text."""
    own, found = run.crashes.get(instance), run.activities.get(instance)
    crash = None if first is None else run.crashes.get(first)
    if own and own.kind not in ("InstanceError", "KeyboardInterrupt"):
        if crash and (own.kind, own.place) == (crash.kind, crash.place):
            return "failed", "in the same way"
        at = f"at {own.place}" if own.place else "too"
        if crash and own.kind == crash.kind == "CollectiveMismatchError":
            return "noticed it", at
        return "failed", f"{at}: {own.message.splitlines()[0]}"
    if found and found.text and found.text.startswith(AFTER):
        before = None if first is None else run.activities.get(first)
        if before and before.text == found.text:
            return "failed", "in the same way"
        return "failed", f"with {found.text.removeprefix(AFTER)}"
    if own and own.place and (found is None or found.text is None or _is_end(found)):
        return "was", f"at {own.place}"
    if found is None:
        return "has", "not yet used gpusim's collectives"
    return "was", describe(found)


def describe(found: Activity, end: float | None = None) -> str:
    """The activity, and since when."""
    text = f"in {found.text}" if found.text else "running code of its own"
    if end is None:
        return text
    seconds = max(0.0, end - found.since)
    clock = time.strftime("%H:%M:%S", time.localtime(found.since))
    return f"{text} (since {clock}, for {seconds:.1f} s)"


def names(instances: Sequence[int]) -> str:
    """The instances, in words.

    >>> names([3]), names([0, 2]), names([0, 2, 3, 4, 6])
    ('instance 3', 'instances 0 and 2', 'instances 0, 2 to 4 and 6')
    """
    runs: list[list[int]] = []
    for instance in instances:
        if runs and runs[-1][-1] == instance - 1:
            runs[-1].append(instance)
        else:
            runs.append([instance])
    words: list[str] = []
    for run in runs:
        words += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    *most, last = words
    return f"instance{'s' * (len(instances) > 1)} " + (
        f"{', '.join(most)} and {last}" if most else last
    )


def _is_end(found: Activity) -> bool:
    return found.text is not None and found.text.startswith((ENDED, AFTER))


def _shortened(lines: Sequence[str]) -> Iterator[str]:
    """The lines, cut, without those in the middle of many."""
    for line in lines if len(lines) <= MOST_LINES else lines[: MOST_LINES // 2]:
        yield line[:MOST_CHARACTERS]
    if len(lines) > MOST_LINES:
        yield f"... {len(lines) - MOST_LINES} more lines ..."
        for line in lines[-(MOST_LINES - MOST_LINES // 2) :]:
            yield line[:MOST_CHARACTERS]
