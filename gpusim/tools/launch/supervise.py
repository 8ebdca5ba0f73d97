"""Runs mpirun: passes on its output line by line and the signals, and ends everything on failure.

After a failure no process of the run stays behind on this host.
"""

from __future__ import annotations

import os
import queue
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from gpusim.platforms import signals
from gpusim.runtime import activity
from gpusim.runtime.reaper import start_reaper
from gpusim.tools.launch import report
from gpusim.tools.launch.crashes import NOT_IN_MESSAGE, HeldErrors, read_crash

__all__ = ["supervise"]

STOPPING = signals("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
FORWARDED = signals("SIGUSR1", "SIGUSR2")
PATIENCE = 8.0  # seconds for mpirun to end its instances, before it is killed
TERMINAL_HEAD_START = 1.0  # seconds: the terminal has sent Ctrl-C to mpirun as well
POLL = 1.0  # seconds between looks at the heartbeats
FLUSH_AFTER = 0.2  # seconds, for an unfinished line
UNREAD_LINES = 8  # of an instance's errors that are no traceback: of MPI's, for example
HIDDEN_LINES = 20  # of an instance's errors, kept for the case that it fails
MPIRUN_LINES = 400  # of mpirun's own errors
TAG = re.compile(rb"\[[^],]*,(\d+)\]<(?:stdout|stderr)>:")

# Where Open MPI 5 and 4 put an mpirun's session. An mpirun that is killed leaves it behind, and a
# later one with the same process id fails: so each run has a folder, which is removed.
SESSION_FOLDERS = ("PRTE_MCA_prte_local_tmpdir_base", "OMPI_MCA_orte_local_tmpdir_base")

NOISE = re.compile(rb"\[[^]]+:\d+\] \w+ ERROR: ")
RULE = b"-" * 40  # before and after a message of mpirun

FAILED = object()  # an event: mpirun has begun to report a failure


@dataclass
class MpirunState:
    """A running mpirun, and what is known of its failure."""

    process: subprocess.Popen[bytes]
    folder: Path
    instances: int
    only: int | None
    verbose: bool
    events: queue.SimpleQueue[Any]
    errors: deque[bytes] = field(default_factory=lambda: deque(maxlen=MPIRUN_LINES))
    held: HeldErrors = field(default_factory=HeldErrors)
    unfinished: list[bytes] = field(default_factory=list)  # a message of mpirun's
    noise: list[bytes] = field(default_factory=list)  # of mpirun, when it loses an instance
    hidden: dict[int, deque[bytes]] = field(default_factory=dict)
    stopped_by: signal.Signals | None = None
    kill_at: float | None = None
    terminate_at: float | None = None  # if the terminal's signal has not ended it
    blocking: report.Failure | None = None  # an instance that all others wait for
    activities: dict[int, activity.Activity] = field(default_factory=dict)
    failed_at: float | None = None  # as time.time()


def supervise(
    command_line: Callable[[dict[str, str], str], Sequence[str]],
    instances: int,
    *,
    only: int | None = None,
    verbose: bool = False,
    feed: bool = False,
    environ: dict[str, str],
    complain: Callable[[object], None],
) -> int:
    """Run mpirun to its end, and return the exit code.

    **Arguments**

    - `command_line`: makes mpirun's command line from its environment and the name of the file that
      instance 0 reads.
    - `instances`: their number. `only`: the one whose output is shown; None for all.
    - `verbose`: whether to show the errors of all instances when the run fails, and mpirun's
      messages.
    - `feed`: whether to copy standard input into that file.
    - `environ`: mpirun's environment. `complain`: prints a line on standard error.
    """
    with tempfile.TemporaryDirectory(prefix="gpusim-poprun-", ignore_cleanup_errors=True) as folder:
        environ = environ | dict.fromkeys((activity.FOLDER, *SESSION_FOLDERS), folder)
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        fifo = os.path.join(folder, "input")
        if feed:
            os.mkfifo(fifo, 0o600)
            threading.Thread(target=copy_input, args=(fifo,), daemon=True).start()
        reaper = start_reaper(folder)
        succeeded = False
        try:
            with signals_into(events):
                process = subprocess.Popen(
                    command_line(environ, fifo),
                    env=environ,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    restore_signals=False,  # SIGPIPE must not keep it from ending the instances
                )
                state = MpirunState(process, Path(folder), instances, only, verbose, events)
                code = watch(state)
            succeeded = not code and not state.stopped_by
        finally:
            reaper.communicate(b"succeeded" if succeeded else b"")
        return finish(state, code, complain)


@contextmanager
def signals_into(events: queue.SimpleQueue[Any]) -> Iterator[None]:
    """Turn signals into events, except those that the caller ignores (nohup, background jobs)."""
    before = {}
    for number in (*STOPPING, *FORWARDED):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, lambda n, _: events.put(signal.Signals(n)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- while it runs


def watch(state: MpirunState) -> int:
    """Handle events until mpirun has ended and all its output is read; return its exit code."""
    process, events = state.process, state.events
    pipes = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    readers = [
        threading.Thread(target=copy_output, args=(state, pipe, sink), daemon=True)
        for pipe, sink in pipes
    ]
    waiter = threading.Thread(target=lambda: events.put(process.wait()), daemon=True)
    for thread in (*readers, waiter):
        thread.start()
    while True:
        try:
            event = events.get(timeout=time_to_next(state))
        except queue.Empty:
            on_time(state)
            continue
        if isinstance(event, signal.Signals):
            on_signal(state, event)
        elif isinstance(event, BrokenPipeError):  # the reader, `head` for example, has ended
            stop(state, signal.SIGPIPE)
        elif event is FAILED:
            record_failure(state)
        else:
            record_failure(state)
            for thread in readers:
                thread.join(FLUSH_AFTER + 1)  # a process left behind may hold the pipes
            for instance, found in activity.read(state.folder).items():
                before = state.activities.get(instance)
                if before and before.text is None and found.text is not None:
                    # Of one that ran code of its own, the place at which SIGTERM ended it.
                    state.activities[instance] = replace(before, text=found.text)
            return int(event)


def time_to_next(state: MpirunState) -> float:
    """The seconds until `on_time` has something to do."""
    times = [t for t in (state.kill_at, state.terminate_at) if t is not None]
    return max(0.0, min([POLL, *(t - time.monotonic() for t in times)]))


def on_time(state: MpirunState) -> None:
    """Send the signals that are due, and look for an instance that all others wait for."""
    now = time.monotonic()
    if state.kill_at is not None and now >= state.kill_at:
        state.kill_at = None
        state.process.kill()
    if state.terminate_at is not None and now >= state.terminate_at:
        state.terminate_at = None
        state.process.send_signal(signal.SIGTERM)
    if state.kill_at is None and state.blocking is None:
        activities = activity.read(state.folder)
        state.blocking = report.blocking_instance(activities, state.instances, time.time())
        if state.blocking:
            stop(state, None)


def on_signal(state: MpirunState, number: signal.Signals) -> None:
    if number in FORWARDED:
        state.process.send_signal(number)  # mpirun sends it to all instances
    elif state.stopped_by:
        state.process.kill()  # the second request
    else:
        stop(state, number, of_terminal=number in (signal.SIGINT, signal.SIGQUIT))


def stop(state: MpirunState, number: signal.Signals | None, of_terminal: bool = False) -> None:
    """Have mpirun end all instances."""
    record_failure(state)
    state.stopped_by = number
    state.kill_at = time.monotonic() + PATIENCE
    if of_terminal and in_foreground():
        state.terminate_at = time.monotonic() + TERMINAL_HEAD_START
    else:
        state.process.send_signal(signal.SIGTERM)


def record_failure(state: MpirunState) -> None:
    """Read what the instances are doing, before their ends change it."""
    if state.failed_at is None:
        state.failed_at = time.time()
        state.activities = activity.read(state.folder)
    if state.kill_at is None:
        state.kill_at = time.monotonic() + PATIENCE


def in_foreground() -> bool:
    """Whether the terminal's keys reach this process and its children."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


# ---------------------------------------------------------------- input and output


def copy_input(fifo: str) -> None:
    """Copy standard input into the FIFO that instance 0 reads; runs in a thread."""
    try:
        with open(fifo, "wb", buffering=0) as sink:  # returns when the instance opens it
            while chunk := os.read(0, 1 << 16):
                sink.write(chunk)
    except OSError:  # the instance has ended, or has closed it
        return


def copy_output(state: MpirunState, pipe: IO[bytes] | None, sink: Any) -> None:
    """Copy lines, and after a while the beginning of an unfinished one; runs in a thread."""
    assert pipe is not None
    out = getattr(sink, "buffer", None)
    of_errors = pipe is state.process.stderr
    rest, show = b"", True  # the unfinished line; whether its beginning is shown
    continued = False
    while True:
        waits = bool(rest) or (of_errors and bool(state.held))
        ready, _, _ = select.select([pipe], [], [], FLUSH_AFTER if waits else None)
        chunk = os.read(pipe.fileno(), 1 << 16) if ready else b""
        *lines, rest = (rest + chunk).splitlines(keepends=True) or [b""]
        if rest.endswith((b"\n", b"\r")):
            lines, rest = [*lines, rest], b""
        at_end = bool(ready) and not chunk
        flush = not ready or at_end
        pieces = lines + [rest] * bool(flush and rest)
        wanted = []
        for piece in pieces:
            held = of_errors and state.held.take(piece, continued=continued)
            if not continued:
                show = is_shown(state, piece, of_errors=of_errors and not held)
            continued = not piece.endswith(b"\n")
            if of_errors and not TAG.match(piece):
                wanted += [line for line in of_mpirun(state, piece) if show]
            elif show and (state.verbose or not held):
                wanted.append(piece)
        if of_errors and state.failed_at is None and not state.verbose:
            wanted += released(state)
        if flush:
            rest = b""
        if at_end and continued and show:
            wanted.append(b"\n")  # poprun's own lines come next
        try:
            write(out, sink, b"".join(wanted))
        except BrokenPipeError as error:
            state.events.put(error)
            out = sink = None
        if at_end:
            return


def write(out: Any, sink: Any, text: bytes) -> None:
    if text and out is not None:
        out.write(text)
        out.flush()
    elif text and sink is not None:  # not a file: in a capturing test, or a notebook
        sink.write(text.decode(errors="replace"))


def is_shown(state: MpirunState, line: bytes, *, of_errors: bool) -> bool:
    """Whether to show the line; keeps it if it may explain a failure."""
    match = TAG.match(line)
    if match is None:
        if of_errors:
            state.errors.append(line)
            if b"exited on signal" in line or b"non-zero status" in line or b"abort" in line:
                state.events.put(FAILED)
        return True
    instance = int(match[1])
    if state.only is None or instance == state.only:
        return True
    if of_errors:
        state.hidden.setdefault(instance, deque(maxlen=HIDDEN_LINES)).append(line)
    return False


def of_mpirun(state: MpirunState, line: bytes) -> list[bytes]:
    """The lines of mpirun's own to show now: all but the reports that poprun's own replaces."""
    if state.verbose:
        return [line]
    rule = line.startswith(RULE)
    if NOISE.match(line):
        state.noise.append(line)
        return []
    if not state.unfinished and not rule:
        return [line]
    state.unfinished.append(line)
    if not rule or len(state.unfinished) == 1:
        return []
    found, state.unfinished = state.unfinished, []
    text = b"".join(found).decode(errors="replace")
    return [] if report.failure_in(text, 1) or "Primary job" in text else found


def released(state: MpirunState, **age: float) -> list[bytes]:
    """The lines that are held back no longer, of the instances that are shown."""
    lines = state.held.release(**age).splitlines(keepends=True)
    return [line for line in lines if is_shown(state, line, of_errors=True)]


# ---------------------------------------------------------------- the end


def finish(state: MpirunState, code: int, complain: Callable[[object], None]) -> int:
    """Report the failure, if any, and return poprun's exit code."""
    if state.stopped_by is signal.SIGPIPE:
        return 128 + signal.SIGPIPE
    killed = code < 0  # mpirun itself, not an instance
    if killed:
        code = 128 - code
    errors = b"".join(state.errors).decode(errors="replace")
    failure = state.blocking or (None if state.stopped_by else report.failure_in(errors, code))
    if killed and failure and failure.code:
        code = failure.code  # mpirun has failed after the instance
    if state.stopped_by:
        heading = f"stopped by {state.stopped_by.name}"
        code = 128 + state.stopped_by
    elif state.blocking:
        code = code or 1
        heading = ""
    else:
        heading = report.unnamed(code, mpirun=killed)
    texts = state.held.texts()
    crashes = {i: crash for i, text in texts.items() if (crash := read_crash(text))}
    first = report.culprit(failure, crashes)
    if not state.verbose and (code == 0 or (first is None and not state.stopped_by)):
        rest = [*state.noise, *state.unfinished, *released(state, older_than=0)]
        sys.stderr.write(b"".join(rest).decode(errors="replace"))
    if code == 0:
        return 0
    if first is not None and first not in crashes and not state.verbose:
        for line in texts.get(first, "").splitlines()[:UNREAD_LINES]:
            if not line.startswith(NOT_IN_MESSAGE):
                complain(f"instance {first}: {line}")
    if first is not None and (lines := state.hidden.get(first)):
        complain(f"the last errors of instance {first}, which were not shown:")
        sys.stderr.write(b"".join(lines).decode(errors="replace"))
    end = state.failed_at or time.time()
    run = report.Run(state.instances, crashes, state.activities, end)
    here = os.path.join(os.getcwd(), "")
    for line in report.last_lines(heading, failure, run):
        complain(line.replace(here, ""))
    if crashes and not state.verbose:
        complain(f"exit code {code}; --verbose shows all that the instances have written")
    return code
