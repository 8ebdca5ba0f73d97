"""Run a command within a limit: it ends, with all processes that it has started, or is killed."""

from __future__ import annotations

import os
import queue
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

__all__ = ["Done", "run"]

ROOT = Path(__file__).parents[2]
MARK = "GPUSIM_GPU_COMMAND"  # in the environment of every process of a command
TICK = 0.5  # seconds
GRACE = 15.0  # seconds between the interrupt and the kill, in which partial results are written


@dataclass(frozen=True)
class Done:
    """The end of a command: its exit code (None if it was cut at the limit), and its seconds."""

    code: int | None
    seconds: float


def run(
    command: Sequence[str],
    limit: float,
    environment: Mapping[str, str],
    show: Callable[[str], None],
    tick: Callable[[], None] = lambda: None,
    grace: float = GRACE,
) -> Done:
    """Run a command in the repository's root, and leave no process behind.

    At the limit the process group is interrupted, and killed `grace` seconds later. The processes
    are found by a variable of their environment, so that those in other groups or sessions, such as
    mpirun's ranks, are killed too.

    **Arguments**:

    - `limit`: seconds.
    - `environment`: the variables of the command.
    - `show`: is called with each line of its standard output and error.
    - `tick`: is called about twice a second while it prints nothing.

    **Raises**: KeyboardInterrupt after Ctrl-C, once the command has ended.
    """
    start, token = time.monotonic(), secrets.token_hex(8)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment, MARK: token},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()

    def follow(until: float) -> bool:
        """Show lines until the process ends; False at the time `until`."""
        while process.poll() is None:
            left = until - time.monotonic()
            if left <= 0:
                return False
            try:
                line = lines.get(timeout=min(TICK, left))
            except queue.Empty:
                tick()
            else:
                if line is None:  # its output is closed
                    time.sleep(min(TICK, left))
                else:
                    show(line)
        return True

    try:
        try:
            in_time = follow(start + limit)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                follow(time.monotonic() + grace)
    finally:
        _kill(process, token)
        for line in _rest(lines):
            show(line)
    return Done(process.returncode if in_time else None, time.monotonic() - start)


def _read(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _rest(lines: queue.SimpleQueue[str | None]) -> list[str]:
    """The lines that were not shown yet."""
    found: list[str] = []
    while True:
        try:
            line = lines.get(timeout=1)
        except queue.Empty:
            return found
        if line is None:
            return found
        found.append(line)


def _kill(process: subprocess.Popen[str], token: str) -> None:
    """Kill the command and all processes that carry its mark."""
    mark = f"{MARK}={token}".encode()
    for _ in range(50):  # a process may start another one meanwhile
        found = [pid for pid in _processes() if mark in _environment(pid)]
        if process.poll() is None:
            found.append(process.pid)
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # it has ended
                continue
        time.sleep(0.05)


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def _environment(pid: int) -> list[bytes]:
    """Empty if the process has ended, or belongs to another user."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
