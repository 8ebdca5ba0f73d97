"""Runs mpirun: passes its output on line by line, signals to it, and sees that all ends.

When something fails, nothing that the run started stays behind on this host.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gpusim.runtime import activity
from gpusim.tools.launch import guard, report
from gpusim.tools.launch.mpirun import leashed

__all__ = ["Run", "supervise"]

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
PATIENCE = 8.0  # seconds for mpirun to end what it started, before it is killed
TERMINAL_HEAD_START = 1.0  # seconds: the terminal has sent Ctrl-C to mpirun as well
LOOK_EVERY = 1.0  # seconds between looks at the notes
SETTLED = 0.2  # seconds after which half a line is passed on too
HIDDEN_LINES = 20  # of an instance's errors that are kept, in case it fails
SAID = 400  # lines of mpirun's own that are kept
TAG = re.compile(rb"\[[^],]*,(\d+)\]<(?:stdout|stderr)>:")


@dataclass
class Run:
    """What was started, and how it goes."""

    process: subprocess.Popen[bytes]
    folder: Path
    instances: int
    only: int | None
    events: queue.SimpleQueue[Any]
    said: deque[bytes] = field(default_factory=lambda: deque(maxlen=SAID))
    hidden: dict[int, deque[bytes]] = field(default_factory=dict)
    stopped_by: signal.Signals | None = None
    deadline: float | None = None  # when mpirun is killed
    nudge: float | None = None  # when it is sent a signal that it should already have
    alone: report.Failure | None = None
    notes: dict[int, activity.Activity] = field(default_factory=dict)
    noticed: float | None = None  # when the end began, as time.time()


def supervise(
    command_line: Callable[[dict[str, str], str], Sequence[str]],
    instances: int,
    *,
    only: int | None = None,
    feed: bool = False,
    environ: dict[str, str],
    complain: Callable[[object], None],
) -> int:
    """Run mpirun to its end, and return the exit code.

    **Arguments**

    - `command_line`: of mpirun, made from the environment that it will have, and from the name of
      the file that instance 0 reads from.
    - `instances`: how many it starts. `only`: the one whose output is shown; None for all.
    - `feed`: whether to copy standard input into that file.
    - `environ`: mpirun's environment. `complain`: prints a line on standard error.
    """
    with tempfile.TemporaryDirectory(prefix="gpusim-poprun-", ignore_cleanup_errors=True) as name:
        given = environ | {activity.FOLDER: name}
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        fifo = os.path.join(name, "input")
        if feed:
            os.mkfifo(fifo, 0o600)
            threading.Thread(target=copy_input, args=(fifo,), daemon=True).start()
        with guarded(name), signals_into(events):
            process = subprocess.Popen(
                leashed(signal.SIGTERM, os.getpid(), command_line(given, fifo)),
                env=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            run = Run(process, Path(name), instances, only, events)
            try:
                code = watch(run)
            finally:
                if process.poll() is None:  # an error of our own
                    process.kill()
                    process.wait()
            if code or run.stopped_by:
                guard.sweep(name)
        return finish(run, code, complain)


@contextmanager
def guarded(folder: str) -> Iterator[None]:
    """Have another process clear up if this one is killed meanwhile."""
    process = subprocess.Popen(
        [sys.executable, "-I", guard.__file__, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what is sent to our group must not reach it
    )
    try:
        yield
    finally:
        process.communicate(b"!")


@contextmanager
def signals_into(events: queue.SimpleQueue[Any]) -> Iterator[None]:
    """Signals become events, except those that the caller ignores (nohup, background jobs)."""
    before = {}
    for number in (*STOPPING, *PASSED_ON):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, lambda n, _: events.put(signal.Signals(n)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- until it ends


def watch(run: Run) -> int:
    """Pass everything on until mpirun has ended and all its output is read; its exit code."""
    readers = [
        threading.Thread(target=pass_on, args=(run, pipe, sink), daemon=True)
        for pipe, sink in (
            (run.process.stdout, sys.stdout),
            (run.process.stderr, sys.stderr),
        )
    ]
    waiter = threading.Thread(target=lambda: run.events.put(run.process.wait()), daemon=True)
    for thread in (*readers, waiter):
        thread.start()
    while True:
        try:
            event = run.events.get(timeout=time_left(run))
        except queue.Empty:
            look(run)
            continue
        if isinstance(event, signal.Signals):
            on_signal(run, event)
        elif isinstance(event, BrokenPipeError):  # the reader, `head` say, has seen enough
            stop(run, signal.SIGPIPE)
        elif event is FAILED:
            notice(run)
        else:
            notice(run)
            for thread in readers:
                thread.join(SETTLED + 1)  # a process left behind may hold the pipes
            return int(event)


FAILED = object()  # mpirun has begun to say what failed


def time_left(run: Run) -> float:
    """Until there is something to do, if nothing happens."""
    times = [t for t in (run.deadline, run.nudge) if t is not None]
    return max(0.0, min([LOOK_EVERY, *(t - time.monotonic() for t in times)]))


def look(run: Run) -> None:
    """What is due: a signal that did not get through, the end of patience, one left alone."""
    now = time.monotonic()
    if run.deadline is not None and now >= run.deadline:
        run.deadline = None
        run.process.kill()
    if run.nudge is not None and now >= run.nudge:
        run.nudge = None
        run.process.send_signal(signal.SIGTERM)
    if run.deadline is None and run.alone is None:
        notes = activity.read(run.folder)
        run.alone = report.left_alone(notes, run.instances, time.time())
        if run.alone:
            stop(run, None)


def on_signal(run: Run, number: signal.Signals) -> None:
    if number in PASSED_ON:
        run.process.send_signal(number)  # mpirun sends it on to all instances
    elif run.stopped_by:
        run.process.kill()  # asked twice
    else:
        stop(run, number, of_terminal=number in (signal.SIGINT, signal.SIGQUIT))


def stop(run: Run, number: signal.Signals | None, of_terminal: bool = False) -> None:
    """Have mpirun end all instances."""
    notice(run)
    run.stopped_by = number
    run.deadline = time.monotonic() + PATIENCE
    if of_terminal and in_foreground():
        run.nudge = time.monotonic() + TERMINAL_HEAD_START
    else:
        run.process.send_signal(signal.SIGTERM)


def notice(run: Run) -> None:
    """Keep what the instances are doing now: their ends change it."""
    if run.noticed is None:
        run.noticed = time.time()
        run.notes = activity.read(run.folder)
    if run.deadline is None:
        run.deadline = time.monotonic() + PATIENCE


def in_foreground() -> bool:
    """Whether the terminal's keys reach this process and its children."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


# ---------------------------------------------------------------- input and output


def copy_input(fifo: str) -> None:
    """Standard input, into the FIFO that instance 0 reads; runs in a thread of its own."""
    try:
        with open(fifo, "wb", buffering=0) as sink:  # returns when the instance opens it
            while chunk := os.read(0, 1 << 16):
                sink.write(chunk)
    except OSError:  # the instance has ended, or reads no more
        return


def pass_on(run: Run, pipe: IO[bytes] | None, sink: Any) -> None:
    """Copy lines, or what there is of one that stays unfinished; runs in a thread of its own."""
    assert pipe is not None
    out = getattr(sink, "buffer", None)
    rest, shown = b"", True  # the unfinished line; whether its beginning is shown
    continued = False
    while True:
        ready, _, _ = select.select([pipe], [], [], SETTLED if rest else None)
        chunk = os.read(pipe.fileno(), 1 << 16) if ready else b""
        *lines, rest = (rest + chunk).splitlines(keepends=True) or [b""]
        if rest.endswith((b"\n", b"\r")):
            lines, rest = [*lines, rest], b""
        at_end = bool(ready) and not chunk
        settled = not ready or at_end
        pieces = lines + [rest] * bool(settled and rest)
        wanted = []
        for piece in pieces:
            shown = shown if continued else keep(run, piece, of_errors=pipe is run.process.stderr)
            continued = not piece.endswith(b"\n")
            wanted += [piece] * shown
        if settled:
            rest = b""
        if at_end and continued and shown:
            wanted.append(b"\n")  # what poprun says afterwards has lines of its own
        try:
            write(out, sink, b"".join(wanted))
        except BrokenPipeError as error:
            run.events.put(error)
            out = sink = None
        if at_end:
            return


def write(out: Any, sink: Any, text: bytes) -> None:
    if text and out is not None:
        out.write(text)
        out.flush()
    elif text and sink is not None:  # no file: a capturing test's or a notebook's
        sink.write(text.decode(errors="replace"))


def keep(run: Run, line: bytes, *, of_errors: bool) -> bool:
    """Whether to show the line; remembers it if it may explain a failure."""
    match = TAG.match(line)
    if match is None:
        if of_errors:
            run.said.append(line)
            if b"exited on signal" in line or b"non-zero status" in line or b"abort" in line:
                run.events.put(FAILED)
        return True
    instance = int(match[1])
    if run.only is None or instance == run.only:
        return True
    if of_errors:
        run.hidden.setdefault(instance, deque(maxlen=HIDDEN_LINES)).append(line)
    return False


# ---------------------------------------------------------------- the end


def finish(run: Run, code: int, complain: Callable[[object], None]) -> int:
    """Say what failed, if something has, and return poprun's exit code."""
    if run.stopped_by is signal.SIGPIPE:
        return 128 + signal.SIGPIPE
    killed = code < 0  # mpirun itself, not an instance
    if killed:
        code = 128 - code
    said = b"".join(run.said).decode(errors="replace")
    failure = run.alone or (None if run.stopped_by else report.failure_in(said, code))
    if run.stopped_by:
        heading = f"stopped by {run.stopped_by.name}"
        code = 128 + run.stopped_by
    elif run.alone:
        code = code or 1
        heading = ""
    elif code == 0:
        return 0
    else:
        heading = report.unnamed(code, mpirun=killed)
    if failure and (lines := run.hidden.get(failure.instance)):
        complain(f"the last errors of instance {failure.instance}, which were not shown:")
        sys.stderr.write(b"".join(lines).decode(errors="replace"))
    end = run.noticed or time.time()
    for line in report.last_lines(heading, failure, run.notes, run.instances, end):
        complain(line)
    return code
