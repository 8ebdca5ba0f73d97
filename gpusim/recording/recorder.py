"""The Recorder: calls in memory, sums by place, and the lines and arrays of a record."""

from __future__ import annotations

import functools
import json
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from ..version import __version__
from .arrays import ArrayFolder, digest_of, raw_bytes, with_one_nan

__all__ = ["RecordedCall", "RecordedGroup", "Recorder", "SummaryRow", "settings_of"]

FORMAT = 3

Value = tuple[str, tuple[int, ...], NDArray[Any]]
"""A tensor's dtype and shape, and its elements, of any dtype of the same width."""
Traced = tuple[str, tuple[int, ...], str]
"""A tensor's dtype, shape and digest."""


class RecordedCall(NamedTuple):
    """A call of one rank. Ranks are global ranks.

    **Attributes**:

    - `rank`, `sequence`: who calls, and how many calls of any kind the rank has made before.
    - `group`, `number`: the group's label, and how many collectives the rank has called on it
      before; None for messages. The ranks' parts of a collective have both in common.
    - `operation`: "all_reduce", "all_gather", "send", ...
    - `dtypes`, `shapes`, `bytes`: of the tensors that the rank passes; of those that it receives in
      recv and scatter.
    - `site`: file:line of the user's code.
    - `op`, `reduction`: the operator ("SUM"), and the text of the Reduction, as
      `gpusim.as_reduction` takes it.
    - `reductions_before`: how many tensors the group reduced before, which stochastic rounding
      depends on.
    - `root`: of broadcast, reduce, gather and scatter.
    - `peer`, `tag`: of a message: to whom or from whom (None: from any rank), and its tag.
    - `send_counts`, `receive_counts`: of all_to_all: how many elements the rank sends to each rank
      of the group, and receives from each.
    - `operands`: dtype, shape and digest of each tensor whose values the call reads, if digests are
      recorded: the tensors of `shapes`, but the root's alone in broadcast and scatter.
    - `program_call`: which of a compiled program's calls it is, where these run in any order (JAX).
    """

    rank: int
    sequence: int
    group: str
    number: int | None
    operation: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    site: str
    op: str | None = None
    reduction: str | None = None
    reductions_before: int | None = None
    root: int | None = None
    peer: int | None = None
    tag: int | None = None
    send_counts: tuple[int, ...] | None = None
    receive_counts: tuple[int, ...] | None = None
    operands: tuple[Traced, ...] | None = None
    program_call: int | None = None


@functools.lru_cache(maxsize=64)
def settings_of(reduction: Any) -> str:
    """A Reduction as the record has it."""
    return str(reduction)


block_recorder: Recorder | None = None
"""The recorder of the `gpusim.record` block around, which launches inside take."""


class RecordedGroup(NamedTuple):
    """A group of ranks: a label of its own, its name and description, and its global ranks."""

    group: str
    name: str
    description: str
    ranks: tuple[int, ...]


class SummaryRow(NamedTuple):
    """All calls of one place in the program that agree in the other columns.

    `group_size` is the number of ranks in a group, `description` what torch says of it. `ranks` is
    how many ranks make the calls; `calls` and `bytes` are those of the rank that makes most.
    """

    site: str
    operation: str
    op: str
    dtype: str
    order: str
    group_size: int
    description: str
    ranks: int
    calls: int
    bytes: int


class Recorder:
    """The record of a launch: its newest calls, sums of all calls and, if asked for, a file.

    It holds one launch at a time; the next one replaces the record and the file.

    **Arguments**:

    - `path`: a file for all calls, one line each, written as the call is made: after a kill all
      lines but the last are there and valid. If it cannot be written any more it ends, with a
      RuntimeWarning; the launch goes on. With `digests` or `arrays` it is a folder, which is made;
      its lines are in `calls.jsonl`.
    - `digests`: whether to record digests of the operands and results of each call.
    - `arrays`: of which calls of a rank, by their number, to keep whole operands and results:
      `range(100, 200)`. Digests are recorded too.
    - `limit`: how many bytes the arrays may take on the disk; the oldest are removed.
    - `keep`: how many calls are kept in `calls`, the newest.
    - `each`: a function to call with each RecordedCall, in the rank's thread.

    **Raises**: ValueError for a negative `keep` or `limit`, and for digests without a `path`;
    OSError by the launch, if the file cannot be made.

    >>> recorder = Recorder()
    >>> recorder.begin(2)
    >>> world = RecordedGroup("0", "0", "", (0, 1))
    >>> for rank in (0, 1):
    ...     _ = recorder.add(world, rank, 0, "all_reduce", [("float32", (3,), 12)], "train.py:7")
    >>> [(call.rank, call.sequence, call.bytes) for call in recorder.calls]
    [(0, 0, 12), (1, 0, 12)]
    >>> [(row.site, row.operation, row.ranks, row.calls) for row in recorder.summary()]
    [('train.py:7', 'all_reduce', 2, 1)]
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        digests: bool = False,
        arrays: range | None = None,
        limit: int = 2 << 30,
        keep: int = 10_000,
        each: Callable[[RecordedCall], None] | None = None,
    ) -> None:
        if keep < 0:
            raise ValueError(f"Recorder: keep={keep}: expected a number of calls from 0")
        if limit < 0:
            raise ValueError(f"Recorder: limit={limit}: expected a number of bytes from 0")
        self.digests = digests or arrays is not None
        if self.digests and path is None:
            raise ValueError("Recorder: digests and arrays need a path, that of a folder")
        self._chosen = arrays
        self._limit = limit
        self._arrays: ArrayFolder | None = None
        self.path = None if path is None else Path(path).absolute()  # ranks change the folder
        self.calls: deque[RecordedCall] = deque(maxlen=keep)
        self._each = each
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        self.begun = False
        self._clear()

    def _clear(self) -> None:
        self.calls.clear()
        self._made: dict[int, int] = {}
        self._groups: set[str] = set()
        self._sums: dict[SummaryRow, dict[int, list[int]]] = {}

    def begin(self, ranks: int, rank: int | None = None, **about: Any) -> None:
        """Begin the record of a launch, or of one of its ranks, which is a process of its own.

        **Raises**: RuntimeError where it would replace another one of the same `gpusim.record`.
        """
        if self is block_recorder and self.begun:
            raise RuntimeError(
                f"record: {self.path} has a record already: a gpusim.record block holds one launch "
                "of ranks, or the collectives of maps; use a block for each"
            )
        self._clear()
        self.begun = True
        if self.path is not None:
            path = self.path
            if self.digests:
                path.mkdir(exist_ok=True)
                for old in path.glob("calls-*.jsonl" if rank is None else "calls.jsonl"):
                    old.unlink(missing_ok=True)  # of another process's record, or by it
                path /= "calls.jsonl" if rank is None else f"calls-{rank}.jsonl"
            self._file = open(path, "wb", buffering=0)
            if self._chosen is not None or (self.path / "arrays").is_dir():
                prefix = "" if rank is None else f"{rank}-"
                self._arrays = ArrayFolder(self.path / "arrays", prefix, self._limit)
            line = {"kind": "launch", "format": FORMAT, "gpusim": __version__, "ranks": ranks}
            self._write({**line, **about})

    def add(
        self,
        group: RecordedGroup,
        rank: int,
        number: int | None,
        operation: str,
        tensors: Sequence[tuple[str, tuple[int, ...], int]],
        site: str,
        operands: Sequence[Value] = (),
        **more: Any,
    ) -> int:
        """Add a call on tensors of these dtypes, shapes and sizes in bytes; its `sequence`.

        `operands` are traced if digests are recorded, `more` the other fields of a RecordedCall.
        """
        dtypes = tuple(dtype for dtype, _, _ in tensors)
        shapes = tuple(shape for _, shape, _ in tensors)
        total = sum(size for _, _, size in tensors)
        sequence = self._made.get(rank, 0)  # each rank is one thread
        if self.digests:
            more["operands"] = tuple(self._traced(sequence, value) for value in operands)
        with self._lock:
            self._made[rank] = sequence + 1
            place = (rank, sequence, group.group, number, operation)
            call = RecordedCall(*place, dtypes, shapes, total, site, **more)
            self.calls.append(call)
            row = SummaryRow(
                site,
                operation,
                call.op or "",
                ", ".join(dict.fromkeys(dtypes)),
                (call.reduction or "").partition(" ")[0],
                len(group.ranks),
                group.description,
                *(0, 0, 0),
            )
            mine = self._sums.setdefault(row, {}).setdefault(rank, [0, 0])
            mine[0] += 1
            mine[1] += total
            if self._file is not None:
                if group.group not in self._groups:
                    self._groups.add(group.group)
                    self._write({"kind": "group", **group._asdict()})
                fields = call._asdict().items()
                self._write({"kind": "call", **{k: v for k, v in fields if v is not None}})
        if self._each is not None:
            self._each(call)
        return sequence

    def add_results(self, calls: Sequence[tuple[int, int]], values: Sequence[Value]) -> None:
        """Add the results of complete calls, (rank, `sequence`), which all have the same values."""
        if not self.digests:
            return
        traced = [self._traced(calls[0][1], value) for value in values]
        with self._lock:
            if self._file is not None:
                self._write({"kind": "result", "calls": calls, "results": traced})

    def _traced(self, sequence: int, value: Value) -> Traced:
        dtype, shape, array = value
        raw = with_one_nan(raw_bytes(array), dtype)
        digest = digest_of(raw)
        if self._arrays is not None and self._chosen is not None and sequence in self._chosen:
            with self._lock:
                self._arrays.add(digest, raw)
        return dtype, shape, digest

    def end(self, error: BaseException | None = None) -> None:
        """End the record, with the error that ended the launch."""
        with self._lock:
            if self._file is not None:
                end: dict[str, Any] = {"kind": "end", "calls": sum(self._made.values())}
                if error is not None:
                    text = f": {error}" if str(error) else ""
                    end["error"] = f"{type(error).__name__}{text}"
                self._write(end)
            if self._arrays is not None:
                self._arrays.flush()
                self._arrays = None
            if self._file is not None:
                self._file.close()
                self._file = None

    def summary(self) -> list[SummaryRow]:
        """A row for each place and kind of call, those with most bytes first."""
        with self._lock:
            rows = [
                row._replace(
                    ranks=len(sums),
                    calls=max(calls for calls, _ in sums.values()),
                    bytes=max(size for _, size in sums.values()),
                )
                for row, sums in self._sums.items()
            ]
        return sorted(rows, key=lambda row: (-row.bytes, row))

    def _write(self, line: Mapping[str, Any]) -> None:
        """Write a line at once and whole: what a kill leaves is valid."""
        assert self._file is not None
        content = json.dumps(line).encode() + b"\n"
        end = self._file.tell()
        try:
            written = self._file.write(content)
            if written != len(content):
                raise OSError("the disk takes no more")
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)
            self._file.close()
            self._file = None
            warnings.warn(f"the record {self.path} ends: {error}", RuntimeWarning, stacklevel=2)
