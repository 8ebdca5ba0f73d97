"""Traces of what ran when, in the trace event format: what Perfetto and chrome://tracing open.

A file is whole JSON after each flush, and goes on after it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import gpusim
from gpusim.poptorch._logging import logger

__all__ = ["HOST", "Row", "Trace", "open_traces", "opened", "released"]

#: A process and a thread, by their numbers: what a row in the picture is.
Row = tuple[int, int]

HOST = "host"
END = b"\n]}\n"
MANY = 4096  # events that are kept before they are written


class Trace:
    """A file of events. OSError where it cannot be made; later ones end the trace, with a warning.

    **Arguments**

    - `path`: the file, which is replaced; folders are made as needed.
    - `about`: what is said about the whole, by name.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trace = Trace(Path(folder) / "trace.json", {"by": "a doctest"})
    ...     trace.add(trace.row("IPUs", "replica 0"), "work", "device", 1.0, 1.5)
    ...     trace.close()
    ...     found = json.loads((Path(folder) / "trace.json").read_text())
    >>> found["traceEvents"][-1]["name"], found["traceEvents"][-1]["dur"]
    ('work', 500000.0)
    """

    def __init__(self, path: Path, about: Mapping[str, str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = threading.RLock()
        self._events: list[dict[str, Any]] = []
        self._rows: dict[tuple[str, Any], Row] = {}
        self._process = os.getpid()  # a fork has the file too, and must not write to it
        head = {"displayTimeUnit": "ms", "otherData": {"gpusim": gpusim.__version__, **about}}
        begin = json.dumps(head)[:-1].encode() + b', "traceEvents": ['
        self._file = open(path, "wb")
        self._end = len(begin)  # where the next event goes, over the END of those before
        self._separator = b"\n"
        self._write(0, begin + END)

    # ---------------------------------------------------------------- rows

    def row(self, process: str, name: str, key: Any = None) -> Row:
        """A row, made when it is first asked for; rows with another `key` are others."""
        with self._lock:
            where = process, name if key is None else key
            if where not in self._rows:
                self._rows[where] = self._new_row(process, name)
            return self._rows[where]

    def _new_row(self, process: str, name: str) -> Row:
        numbers = {known: pid for (known, _), (pid, _) in self._rows.items()}
        if process not in numbers:
            numbers[process] = len(numbers) + 1
            self._about("process", process, numbers[process], 0)
        pid = numbers[process]
        tid = sum(known == process for known, _ in self._rows) + 1
        self._about("thread", name, pid, tid)
        return pid, tid

    def _about(self, what: str, name: str, pid: int, tid: int) -> None:
        """The name of a process or thread, and that it is shown in the order of the numbers."""
        event = {"ph": "M", "ts": 0, "pid": pid, "tid": tid}
        order = pid if what == "process" else tid
        self._events += [
            {"name": f"{what}_name", **event, "args": {"name": name}},
            {"name": f"{what}_sort_index", **event, "args": {"sort_index": order}},
        ]

    # ---------------------------------------------------------------- events

    def add(
        self, row: Row, name: str, category: str, begin: float, end: float, **args: Any
    ) -> None:
        """Something lasted from `begin` to `end`, in seconds of time.perf_counter."""
        with self._lock:
            self._events.append(
                {
                    "name": name,
                    "cat": category,
                    "ph": "X",
                    "ts": round(begin * 1e6, 3),
                    "dur": round((end - begin) * 1e6, 3),
                    "pid": row[0],
                    "tid": row[1],
                    "args": args,
                }
            )
            if len(self._events) >= MANY:
                self.flush()

    def host(self, name: str, category: str, begin: float, end: float, **args: Any) -> None:
        """The same in the row of the thread that this is."""
        thread = threading.current_thread()
        self.add(self.row(HOST, thread.name, thread.ident), name, category, begin, end, **args)

    # ---------------------------------------------------------------- the file

    def flush(self) -> None:
        """Write what there is; the file is whole then."""
        with self._lock:
            if self._file.closed or self._process != os.getpid() or not self._events:
                return
            lines = self._separator + b",\n".join(json.dumps(one).encode() for one in self._events)
            self._events.clear()
            try:
                self._write(self._end, lines + END)
                self._end += len(lines)
                self._separator = b",\n"
            except OSError as error:
                logger.warning("Profiling ends: %s cannot be written: %s", self.path, str(error))
                self._give_up()

    def _write(self, place: int, content: bytes) -> None:
        self._file.seek(place)
        self._file.write(content)
        self._file.flush()

    def _give_up(self) -> None:
        """Leave the file with the events that it had."""
        number = self._file.fileno()
        with suppress(OSError):
            os.ftruncate(number, self._end)
            os.pwrite(number, END, self._end)
        with suppress(OSError):  # what could not be written is still in its buffer
            self._file.close()

    def close(self) -> None:
        """Write what there is, and take nothing more."""
        self.flush()
        if not self._file.closed and self._process == os.getpid():
            self._file.close()


# ---------------------------------------------------------------- those that are open

_open: dict[Path, tuple[Trace, int]] = {}
_lock = threading.RLock()


def opened(path: Path, about: Mapping[str, str]) -> Trace:
    """The trace at a path: the one that is open there, or a new one. `released` closes it."""
    path = path.resolve()  # the current folder may be another one when it is closed
    with _lock:
        trace, count = _open.get(path, (None, 0))
        if trace is None:
            trace = Trace(path, about)
        _open[path] = trace, count + 1
        return trace


def released(trace: Trace) -> None:
    """One who opened it needs it no more; the last one's closes it."""
    with _lock:
        count = _open[trace.path][1]
        if count > 1:
            _open[trace.path] = trace, count - 1
        else:
            del _open[trace.path]
            trace.close()


def open_traces() -> list[Trace]:
    """All that are open in this process."""
    with _lock:
        return [trace for trace, _ in _open.values()]
