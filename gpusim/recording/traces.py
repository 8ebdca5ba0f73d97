"""Traces of what ran when, in the trace event format, which Perfetto and chrome://tracing open.

A file is valid JSON after each flush, so that a program that is killed leaves its trace. Later
events overwrite the end of the file.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpusim.version import __version__

__all__ = ["HOST", "Row", "Trace", "open_traces", "opened", "released"]

#: A row of the picture: the numbers of a process and a thread.
Row = tuple[int, int]

HOST = "host"
END = b"\n]}\n"
MANY = 4096  # events in memory before they are written


def warn(path: Path, error: OSError) -> None:
    """Warn that a trace ends."""
    warnings.warn(f"the trace {path} ends: {error}", RuntimeWarning, stacklevel=2)


class Trace:
    """A file of events.

    **Arguments**:

    - `path`: the file, which is replaced; folders are made as needed.
    - `about`: metadata of the trace.
    - `ended`: called with the path and the OSError if the file cannot be written any more, which
      ends the trace; a RuntimeWarning by default.

    **Raises**:

    - OSError: if the file cannot be made.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trace = Trace(Path(folder) / "trace.json", {"by": "a doctest"})
    ...     trace.add(trace.row("ranks", "rank 0"), "work", "device", 1.0, 1.5)
    ...     trace.close()
    ...     found = json.loads((Path(folder) / "trace.json").read_text())
    >>> found["traceEvents"][-1]["name"], found["traceEvents"][-1]["dur"]
    ('work', 500000.0)
    """

    def __init__(
        self, path: Path, about: Mapping[str, str], ended: Callable[[Path, OSError], None] = warn
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._ended = ended
        self._lock = threading.RLock()
        self._events: list[dict[str, Any]] = []
        self._rows: dict[str, dict[Any, Row]] = {}  # by process and key
        self._process = os.getpid()  # a fork has the file too, and must not write to it
        head = {"displayTimeUnit": "ms", "otherData": {"gpusim": __version__, **about}}
        begin = json.dumps(head)[:-1].encode() + b', "traceEvents": ['
        self._file = open(path, "wb")
        self._end = len(begin)  # where the next event goes, over the END of those before
        self._separator = b"\n"
        self._write(0, begin + END)

    # ---------------------------------------------------------------- rows

    def row(self, process: str, name: str, key: Any = None) -> Row:
        """The row of this name, or with this `key`; it is made at the first request."""
        key = name if key is None else key
        with self._lock:
            if process not in self._rows:
                self._rows[process] = {}
                self._label("process", process, len(self._rows), 0)
            rows = self._rows[process]
            if key not in rows:
                rows[key] = [*self._rows].index(process) + 1, len(rows) + 1
                self._label("thread", name, *rows[key])
            return rows[key]

    def _label(self, what: str, name: str, pid: int, tid: int) -> None:
        """Name a process or thread, and show it in the order of the numbers."""
        event = {"ph": "M", "ts": 0, "pid": pid, "tid": tid}
        self._events += [
            {"name": f"{what}_name", **event, "args": {"name": name}},
            {"name": f"{what}_sort_index", **event, "args": {"sort_index": tid or pid}},
        ]

    # ---------------------------------------------------------------- events

    def add(
        self, row: Row, name: str, category: str, begin: float, end: float, **args: Any
    ) -> None:
        """Add an event from `begin` to `end`, in seconds of time.perf_counter."""
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
        """Add an event in the row of the calling thread."""
        thread = threading.current_thread()
        self.add(self.row(HOST, thread.name, thread.ident), name, category, begin, end, **args)

    # ---------------------------------------------------------------- the file

    def flush(self) -> None:
        """Write all events."""
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
                self._give_up()
                self._ended(self.path, error)

    def _write(self, place: int, content: bytes) -> None:
        self._file.seek(place)
        self._file.write(content)
        self._file.flush()

    def _give_up(self) -> None:
        """Restore the end of the file after the last event that was written whole."""
        number = self._file.fileno()
        with suppress(OSError):
            os.ftruncate(number, self._end)
            os.pwrite(number, END, self._end)
        with suppress(OSError):  # events that could not be written are in its buffer
            self._file.close()

    def close(self) -> None:
        """Write all events, and ignore later ones."""
        self.flush()
        if not self._file.closed and self._process == os.getpid():
            self._file.close()


# ---------------------------------------------------------------- open traces

_open: dict[Path, tuple[Trace, int]] = {}
_lock = threading.RLock()


def opened(
    path: Path, about: Mapping[str, str], ended: Callable[[Path, OSError], None] = warn
) -> Trace:
    """The open trace at a path, or a new one. `released` closes it."""
    path = path.resolve()  # the current folder may be another one when it is closed
    with _lock:
        trace, count = _open.get(path, (None, 0))
        if trace is None:
            trace = Trace(path, about, ended)
        _open[path] = trace, count + 1
        return trace


def released(trace: Trace) -> None:
    """Undo one `opened`; the last one closes the trace."""
    with _lock:
        count = _open[trace.path][1]
        if count > 1:
            _open[trace.path] = trace, count - 1
        else:
            del _open[trace.path]
            trace.close()


def open_traces() -> list[Trace]:
    """All open traces of this process."""
    with _lock:
        return [trace for trace, _ in _open.values()]
