"""Traces: the tensors that ranks computed, in the order of each rank, on disk.

A rank has two files in the trace's folder: `rank-R.bin`, the elements of all tensors one behind the
other, and `rank-R.jsonl`, a line for each event. The last line, `end`, has what is known of the
whole run. Without it the rank did not end well, and the trace is read up to where it goes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Claim", "Event", "RankTrace", "Slice", "Trace", "TraceWriter", "read"]

FORMAT = 1
Array = NDArray[Any]

BROKEN = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, SyntaxError)
"""The errors of a line of JSON that is not what it seems."""


@dataclass(frozen=True)
class Claim:
    """The layout that a DTensor says it has.

    **Attributes**: `placements`, one for each dimension of the mesh, such as "S0", "R", "P";
    `mesh`, the ranks, by its shape; `shape`, of the whole tensor.
    """

    placements: tuple[str, ...]
    mesh: Any
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """A part of a flattened tensor: where it begins, and the rank's own shape of the tensor."""

    start: int
    shape: tuple[int, ...]


@dataclass(eq=False)
class Event:
    """One tensor of a rank.

    **Attributes**: `kind`, one of `tracing.KINDS`; `root`, the outermost module, and `name`, that
    of the module in it, or of the parameter; `leaf`, which of a module's outputs; `count`, how
    often the rank had the event in this `step` before; `order`, its place among the rank's events;
    `bits`, a digest of random bits; `added`, of a weight's gradient, its place in backward;
    `pool`, of a large tensor, how many elements of each dimension are added.
    """

    kind: str
    root: str
    name: str
    leaf: str
    step: int
    count: int
    order: int
    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    claim: Claim | None = None
    slice: Slice | None = None
    bits: str = ""
    added: int = 0
    pool: tuple[int, ...] = ()
    evaluated: bool = False
    rank: RankTrace = field(default=None, repr=False)  # type: ignore[assignment]

    @property
    def array(self) -> Array:
        """The elements, float64 or int64, in the tensor's shape."""
        return self.rank.array(self)

    def coarse(self, pool: tuple[int, ...]) -> Array:
        """The elements, added in blocks of this shape. **Raises**: ValueError if none fits."""
        own = self.pool or (1,) * len(self.shape)
        if len(pool) != len(own) or any(size % mine for size, mine in zip(pool, own, strict=True)):
            raise ValueError("they are too large, and of shapes that have no blocks in common")
        return coarse(self.array, tuple(a // b for a, b in zip(pool, own, strict=True)))


BLOCK = 8
"""Elements of a dimension that are added where a tensor is large."""
LONG = 64
"""Elements from which on a dimension is divided into blocks."""


def blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The blocks in which a large tensor of this shape is added.

    Sums over blocks of fixed size keep what is compared: parts of a sum add up in them too, and
    shards, whose sizes they divide, are one behind the other.

    >>> blocks((4, 100, 128))
    (1, 1, 8)
    """
    return tuple(BLOCK if size >= LONG and size % BLOCK == 0 else 1 for size in shape)


def coarse(array: Array, pool: tuple[int, ...]) -> Array:
    """The sums over blocks of an array. **Raises**: ValueError if they do not divide its shape.

    >>> coarse(np.arange(6.0).reshape(2, 3), (2, 1))
    array([[3., 5., 7.]])
    """
    shape: list[int] = []
    for size, block in zip(array.shape, pool, strict=True):
        if size % block:
            raise ValueError("they are too large, and of shapes that have no blocks in common")
        shape += size // block, block
    return np.asarray(array.reshape(shape).sum(axis=tuple(range(1, len(shape), 2))))


class TraceWriter:
    """Writes the trace of one rank. Owner: the rank's main thread."""

    def __init__(self, folder: Path, rank: int, ranks: int, limit: int) -> None:
        self.rank, self.limit = rank, limit
        self._data: IO[bytes] = open(folder / f"rank-{rank}.bin", "wb")
        self._lines: IO[str] = open(folder / f"rank-{rank}.jsonl", "w", encoding="utf-8")
        self._at = 0
        self.left_out = 0
        self._written: dict[bytes, int] = {}
        self._line({"format": FORMAT, "rank": rank, "ranks": ranks})

    def write(self, array: Array, **about: Any) -> None:
        """Write an event, whose fields `about` are those of `Event`."""
        if self._at + array.nbytes > self.limit:
            self.left_out += 1
            return
        data = np.ascontiguousarray(array).tobytes()
        # A module often hands on what another computed: the same elements are written once.
        key = hashlib.blake2b(data, digest_size=16).digest()
        start = self._written.get(key)
        if start is None:
            start = self._written[key] = self._at
            self._data.write(data)
            self._at += len(data)
        self._line({"dtype": str(array.dtype), "shape": array.shape, "start": start, **about})

    def end(self, **about: Any) -> None:
        """Write the last line, and close the files."""
        self._line({"end": {"left_out": self.left_out, **about}})
        self._data.close()
        self._lines.close()

    def _line(self, line: Mapping[str, Any]) -> None:
        self._lines.write(json.dumps(line) + "\n")


class RankTrace:
    """The trace of one rank, read back."""

    def __init__(self, path: Path) -> None:
        self.events: list[Event] = []
        self.end: dict[str, Any] = {}
        self.path = path
        self.rank = self.ranks = -1
        with open(path, encoding="utf-8", errors="replace") as lines:
            for number, text in enumerate(lines, 1):
                try:
                    self._take(json.loads(text), first=number == 1)
                except BROKEN as error:
                    raise ValueError(
                        f"{path}:{number}: not a line of a trace: {error!r:.200}"
                    ) from None
        if self.ranks < 0:
            raise ValueError(f"{path}: expected a trace of format {FORMAT}")
        data = path.with_suffix(".bin")
        self._data: Array = (
            np.memmap(data, np.uint8, "r") if data.stat().st_size else np.zeros(0, np.uint8)
        )

    def _take(self, line: Any, *, first: bool) -> None:
        if not first:
            if "end" in line:
                self.end = dict(line["end"])
            else:
                self.events.append(_event(line, self))
            return
        if line.get("format") != FORMAT:
            raise ValueError(f"expected a trace of format {FORMAT}")
        self.rank, self.ranks = line["rank"], line["ranks"]
        if not (type(self.rank) is type(self.ranks) is int and 0 <= self.rank < self.ranks):
            raise ValueError(f"rank {self.rank!r:.40} of {self.ranks!r:.40}")

    def array(self, event: Event) -> Array:
        """The elements of an event. **Raises**: ValueError if the file does not have them."""
        dtype = np.dtype(event.dtype)
        size = math.prod(event.shape) * dtype.itemsize
        if event.start + size > len(self._data):
            raise ValueError(f"{self.path}: {event.name!r:.80}: the file of arrays is cut off")
        flat = self._data[event.start : event.start + size].view(dtype)
        return flat.reshape(event.shape).astype(
            np.float64 if dtype.kind == "f" else np.int64, copy=False
        )


def _event(line: dict[str, Any], rank: RankTrace) -> Event:
    claim, cut = line.pop("claim", None), line.pop("slice", None)
    line["shape"] = tuple(line["shape"])
    line["pool"] = tuple(line.get("pool", ()))
    if np.dtype(line["dtype"]).kind not in "fiub":
        raise ValueError(f"dtype {line['dtype']!r:.40}: expected numbers")
    numbers = (line.get("start", 0), *line["shape"], *line["pool"])
    if not all(type(each) is int and each >= 0 for each in numbers):
        raise ValueError("a place or a shape that is none")
    for name in ("kind", "root", "name", "leaf"):
        if not isinstance(line[name], str):
            raise ValueError(f"{name}={line[name]!r:.40}: expected a text")
    return Event(
        **line,
        claim=claim and Claim(tuple(claim[0]), claim[1], tuple(claim[2])),
        slice=cut and Slice(cut[0], tuple(cut[1])),
        rank=rank,
    )


class Trace:
    """The traces of all ranks of a run."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("rank-*.jsonl"), key=lambda path: int(path.stem[5:]))
        self.by_rank = [RankTrace(path) for path in files]
        if not self.by_rank or len(self.by_rank) != self.by_rank[0].ranks:
            raise ValueError(f"{folder}: expected the trace of each rank")

    @property
    def ranks(self) -> int:
        return len(self.by_rank)

    def ends(self, name: str) -> Iterator[Any]:
        """Each rank's last note under a name; None of one that did not end well."""
        for rank in self.by_rank:
            yield rank.end.get(name)


def read(folder: Path) -> Trace:
    """The trace in a folder. **Raises**: ValueError if it is not whole."""
    return Trace(folder)
