"""The store of a sweep: JSON lines, one for each measured window, appended one by one.

Written lines are never changed; a resumed sweep measures the missing windows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from gpusim.tools.study.metrics import Partial
from gpusim.tools.study.settings import Setting

__all__ = ["Point", "Store"]

VERSION = 3
HEADER = "gpusim study"


@dataclass(frozen=True)
class Point:
    """The subject of one measurement: elements first..first+count-1 of one reduction's result.

    `tensor` names one of several arrays of the input, `input_seed` one of several inputs.
    """

    tensor: str | None
    setting: Setting
    replicas: int
    seed: int
    first: int
    count: int
    input_seed: int | None = None

    @property
    def record(self) -> dict[str, Any]:
        places = {"seed": self.seed, "first": self.first, "count": self.count}
        named: dict[str, Any] = {} if self.tensor is None else {"tensor": self.tensor}
        named |= {} if self.input_seed is None else {"input_seed": self.input_seed}
        return {**named, "replicas": self.replicas, **self.setting.record, **places}

    @property
    def key(self) -> str:
        return _key(self.record)


class Store:
    """The measurements of one input's sweeps: in memory, and in a file where a path is given.

    The first line of the file identifies the input, and has the command that began the sweep.

    **Raises**: FileExistsError for an existing file, unless `resume`; ValueError for a file that is
    not a store, or a store of another input; BlockingIOError if another process writes it. None of
    these changes the file.
    """

    def __init__(
        self,
        identity: dict[str, Any],
        path: Path | None = None,
        *,
        resume: bool = False,
        command: str = "",
    ) -> None:
        self.path = path
        self._found: dict[str, Partial] = {}
        self._file: IO[bytes] | None = None
        self._new = False
        self._lock: Any = None
        if path is None:
            return
        header = _line({HEADER: VERSION, "input": identity, "command": command})
        if path.exists() and not resume:
            raise FileExistsError(f"{path} {_described(path)}choose another file (--store)")
        self._new = not path.exists()
        file = open(path, "x+b" if self._new else "r+b")
        try:
            self._lock = _lock(file, path)
            end = self._read(file, json.loads(header)["input"])
            # A line that was being written when the process was killed is written again.
            file.truncate(end)
            file.seek(end)
            if not end:
                file.write(header)
                file.flush()
        except BaseException:
            file.close()
            if self._lock is not None:
                self._lock.release()
            raise
        self._file = file

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, point: Point) -> Partial | None:
        """The measurement of a point, or None."""
        return self._found.get(point.key)

    def put(self, point: Point, partial: Partial) -> None:
        """Add a measurement; it is in the file before this returns."""
        if self._file is not None:
            self._file.write(_line({**point.record, **partial.record}))
            self._file.flush()
        self._found[point.key] = partial

    def close(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            if self._lock is not None:
                self._lock.release()

    def discard(self) -> None:
        """Remove the file if this store made it: an input that fails would fail again."""
        if self.path is not None and self._new and self._file is not None:
            self.path.unlink(missing_ok=True)
            self._found.clear()

    def _read(self, file: IO[bytes], identity: dict[str, Any]) -> int:
        """Read the file's lines. **Returns**: where the last complete one ends."""
        end = 0
        for number, (line, record) in enumerate(_records(file, self.path), 1):
            if number == 1:
                if record.get(HEADER) != VERSION:
                    raise ValueError(
                        f"{self.path} is not the store of a sweep of this version, {VERSION}, but "
                        f"of {record.get(HEADER)!r}: remove it, or choose another file"
                        if HEADER in record
                        else f"{self.path} is not the store of a sweep"
                    )
                _check_input(self.path, record.get("input"), identity)
            else:
                self._take(record, number)
            end += len(line)
        return end

    def _take(self, record: dict[str, Any], number: int) -> None:
        try:
            partial = Partial.from_record(record)
        except KeyError as error:
            raise ValueError(f"{self.path}, line {number}: {error} is missing") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path}, line {number}: {error!s:.300}") from None
        self._found[_key(record)] = partial


def _records(file: IO[bytes], path: Path | None) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            if number == 1:  # not a store: nothing may be cut off
                raise ValueError(f"{path} is not the store of a sweep")
            return
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: not a line of a sweep's store")
        yield line, record


def _described(path: Path) -> str:
    """The contents of an existing file, and what can be done with it."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or HEADER not in header:
        return "is not the store of a sweep: "
    begun = f", of {header['command']}" if header.get("command") else ""
    return f"holds a sweep already{begun}: go on with it (--resume), delete the file, or "


def _check_input(path: Path | None, there: Any, here: dict[str, Any]) -> None:
    if there == here:
        return
    was = there if isinstance(there, dict) else {}
    different = [
        f"{name:.200} {was.get(name)!r:.200}, not {here.get(name)!r:.200}"
        for name in {**was, **here}
        if was.get(name) != here.get(name)
    ]
    raise ValueError(f"{path} is of another input: its {'; its '.join(different)}")


def _lock(file: IO[bytes], path: Path) -> Any:
    """Lock the store: its file, or a file beside it on Windows, where a lock keeps it from writing.

    **Returns**: the lock beside it, which is to be released; None where the file is locked.
    """
    try:
        try:
            import fcntl
        except ImportError:
            from filelock import FileLock, Timeout

            beside = FileLock(f"{path}.lock")
            try:
                beside.acquire(timeout=0)
            except Timeout:
                raise BlockingIOError from None
            return beside
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(f"{path} is in use: another sweep writes it") from None
    return None


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=True).encode() + b"\n"


def _key(record: dict[str, Any]) -> str:
    return json.dumps(record, sort_keys=True)
