"""Records of runs, read back: collectives in an order of events, with their arrays."""

from __future__ import annotations

import heapq
import json
import math
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gpusim.bounded_arrays import BROKEN, Archive
from gpusim.reduction import as_reduction

__all__ = ["Call", "Event", "Run", "Traced", "read"]

FORMATS = (1, 2, 3)
ABOUT = ("gpusim", "torch", "schedule", "instances")
"""Fields of a record's first line that say what ran."""
TEXTS = ("group", "operation", "site", "op", "reduction")
"""Fields of a call that are texts; the others are whole numbers."""
MOST_RANKS = 1 << 20
LARGEST = 1 << 48
"""Elements of a tensor."""
DIGEST = re.compile("[0-9a-fA-F]{8,64}")
Traced = tuple[str, tuple[int, ...], str]
"""A tensor's dtype, shape and digest."""


def same_elements(a: Sequence[Traced], b: Sequence[Traced]) -> bool:
    """Whether tensors have the same bits, in one tensor or cut into several."""
    if len(a) == len(b):
        return [digest for _, _, digest in a] == [digest for _, _, digest in b]
    return joined(a) == joined(b)


def joined(tensors: Sequence[Traced]) -> tuple[int, int]:
    """The bytes of tensors one behind the other: their number, and their CRC-32.

    CRC-32 is affine: crc(x + y) = crc(x + zeros) ^ crc(zeros) ^ crc(y), with len(y) zero bytes.

    >>> import zlib
    >>> parts = [("uint8", (len(part),), f"{zlib.crc32(part):08x}") for part in (b"abcde", b"fg")]
    >>> joined(parts) == (7, zlib.crc32(b"abcdefg"))
    True
    """
    size = check = 0
    for dtype, shape, digest in tensors:
        zeros = bytes(math.prod(shape) * dtype_of(dtype).itemsize)
        check = zlib.crc32(zeros, check) ^ zlib.crc32(zeros) ^ int(digest[:8], 16)
        size += len(zeros)
    return size, check


@dataclass(eq=False)
class Call:
    """A line "call" of a record, with the results of its line "result"; see gpusim.recording."""

    rank: int
    sequence: int
    group: str
    operation: str
    site: str
    number: int | None = None
    op: str | None = None
    reduction: str | None = None
    root: int | None = None
    peer: int | None = None
    tag: int | None = None
    program_call: int | None = None
    send_counts: tuple[int, ...] | None = None
    receive_counts: tuple[int, ...] | None = None
    operands: list[Traced] | None = None
    results: list[Traced] | None = None
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def kinds(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """dtype and shape of each operand, or of each tensor that is passed."""
        if self.operands:
            return tuple((dtype, shape) for dtype, shape, _ in self.operands)
        return tuple(zip(self.dtypes, self.shapes, strict=True))


@dataclass(eq=False)
class Event:
    """A collective, or one end of a message: the calls of its ranks, by rank."""

    index: int
    ranks: tuple[int, ...]
    calls: dict[int, Call] = field(default_factory=dict)

    @property
    def first(self) -> Call:
        """The call of the lowest rank."""
        return self.calls[min(self.calls)]

    @property
    def complete(self) -> bool:
        return len(self.calls) == len(self.ranks) and self.alike

    @property
    def alike(self) -> bool:
        """Whether all ranks call the same operation."""
        return len({call.operation for call in self.calls.values()}) == 1


class Run:
    """A run: its events in an order that every rank's calls have, and the arrays it kept."""

    def __init__(self, path: Path, ranks: int, about: Mapping[str, Any]) -> None:
        self.path, self.ranks, self.about = path, ranks, about
        self.events: list[Event] = []
        self.error: str | None = None
        self.ended = False
        self._files: dict[str, Path] = {}
        self._opened: tuple[Path, Any] | None = None  # neighbouring calls share a file
        for file in sorted((path / "arrays").glob("*.npz")) if path.is_dir() else []:
            try:
                with zipfile.ZipFile(file) as archive:
                    names = archive.namelist()
            except OSError:  # removed, to make room
                continue
            except BROKEN:
                continue
            self._files.update((name.removesuffix(".npy"), file) for name in names)

    @property
    def written(self) -> str | None:
        """When the record was written, as files have it, in UTC; None if that is not known."""
        files = sorted(self.path.glob("calls*.jsonl")) if self.path.is_dir() else [self.path]
        try:
            latest = max(file.stat().st_mtime for file in files)
        except (OSError, ValueError):  # moved since it was read
            return None
        return datetime.fromtimestamp(latest, UTC).isoformat(sep=" ", timespec="seconds")

    def record(self) -> dict[str, Any]:
        """Who the run is, as JSON has it."""
        found: dict[str, Any] = {
            "path": str(self.path),
            "ranks": self.ranks,
            "events": len(self.events),
            "ended": self.ended,
        }
        known = {name: self.about.get(name) for name in ABOUT}
        known |= {"written": self.written, "error": self.error}
        return found | {name: value for name, value in known.items() if value is not None}

    def array(self, traced: Traced) -> NDArray[Any] | None:
        """The elements of a tensor, if they were kept; those of four bytes are in the digest."""
        dtype, shape, digest = traced
        file = self._files.get(digest)
        if file is None:
            return _small(traced)
        try:
            if self._opened is None or self._opened[0] != file:
                self._opened = file, Archive(file)
            raw: NDArray[Any] = self._opened[1][digest]
            return raw.view(dtype_of(dtype)).reshape(shape)
        except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: {digest} is not {dtype}{list(shape)}: {error}") from None

    def arrays(self, traced: Sequence[Traced] | None) -> list[NDArray[Any]] | None:
        """The elements of several tensors; None if one was not kept."""
        found = [self.array(each) for each in traced or ()]
        return None if traced is None or any(each is None for each in found) else found  # type: ignore[return-value]


def _small(traced: Traced) -> NDArray[Any] | None:
    """A tensor of up to four bytes: the second half of its digest is their sum, the bytes.

    >>> _small(("float32", (1,), "aca16a6a3f800000"))
    array([1.], dtype=float32)
    """
    dtype, shape, digest = traced
    size = math.prod(shape) * dtype_of(dtype).itemsize
    if not 0 < size <= 4:
        return None
    raw = int(digest[8:], 16).to_bytes(4, "little")[:size]
    if f"{zlib.crc32(raw):08x}" != digest[:8]:
        return None
    return np.frombuffer(raw, dtype_of(dtype)).reshape(shape)


def dtype_of(name: str) -> np.dtype[Any]:
    """A dtype by torch's name."""
    return np.dtype(getattr(ml_dtypes, name, name))


def read(path: Path) -> Run:
    """Read a record: a folder, or a file of lines. What a kill left is read as far as it goes.

    **Raises**: OSError if there is no record; ValueError for lines that are not one.
    """
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("calls.jsonl")) or sorted(path.glob("calls-*.jsonl"))
        if not files:
            raise FileNotFoundError(f"{path}: no record: expected calls.jsonl in this folder")
    run: Run | None = None
    groups: dict[str, tuple[int, ...]] = {}
    calls: dict[tuple[int, int], Call] = {}
    ended = widest = 0
    for file in files:
        for where, line in _lines(file):
            try:
                kind = line.get("kind")
                if kind == "launch":
                    if line["format"] not in FORMATS:
                        raise ValueError(f"format {line['format']}, expected one of {FORMATS}")
                    if run is None:
                        run = Run(path, _ranks(line["ranks"]), line)
                    if run.ranks != line["ranks"]:
                        raise ValueError(f"{line['ranks']} ranks, others {run.ranks}; record anew")
                elif kind == "group":
                    _check_types({"group": line["group"]})
                    ranks = groups[line["group"]] = tuple(_ranks(each) for each in line["ranks"])
                    widest = max(widest, *ranks)
                elif kind == "call":
                    call = _call(line)
                    calls[call.rank, call.sequence] = call
                elif kind == "result":
                    for rank, sequence in line["calls"]:
                        calls[rank, sequence].results = _traced(line["results"])
                elif kind == "end":
                    ended += 1
                    if run is not None:
                        run.error = run.error or line.get("error")
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise ValueError(f"{where}: not a line of a record: {error!r:.300}") from None
    if run is None:
        raise ValueError(f"{files[0]}: not a record: expected a line of kind launch")
    written = run.about.get("instances", len(files))
    if written != len(files):
        raise ValueError(
            f"{path}: the records of {len(files)} instances, expected {written}: record anew into "
            "an empty folder, or bring the files of all hosts together"
        )
    run.ranks = max(run.ranks, widest + 1)  # a map around the first call may have been smaller
    run.ended = ended == len(files)
    run.events = _ordered(calls, groups)
    return run


def _lines(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with open(file, "rb") as content:
        for number, text in enumerate(content, 1):
            if not text.endswith(b"\n"):
                return  # a kill's
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if not isinstance(line, dict):
                raise ValueError(f"{file}:{number}: not a line of a record: expected JSON")
            yield f"{file}:{number}", line


def _call(line: Mapping[str, Any]) -> Call:
    names = Call.__dataclass_fields__.keys() - {"operands", "results", "dtypes", "shapes"}
    fields = {name: value for name, value in line.items() if name in names}
    for name in ("send_counts", "receive_counts"):
        if name in fields:
            fields[name] = tuple(fields[name])
    if isinstance(fields.get("reduction"), Mapping):  # of a record of format 1
        fields["reduction"] = _text_of(fields["reduction"])
    _check_types(fields)
    return Call(
        **fields,
        operands=_traced(line["operands"]) if "operands" in line else None,
        dtypes=tuple(map(str, line["dtypes"])),
        shapes=tuple(map(_shape, line["shapes"])),
    )


def _text_of(reduction: Mapping[str, Any]) -> str:
    """The text of a Reduction's fields; of those that format 1 has as a call, the values."""
    try:
        return str(as_reduction(reduction))
    except (TypeError, ValueError):
        return ", ".join(map(str, reduction.values()))


def _traced(given: Any) -> list[Traced]:
    return [(_dtype(dtype), _shape(shape), _digest(digest)) for dtype, shape, digest in given]


def _shape(given: Any) -> tuple[int, ...]:
    """**Raises**: ValueError unless it is the shape of a tensor."""
    shape = tuple(given)
    if not all(type(size) is int and 0 <= size for size in shape) or math.prod(shape) > LARGEST:
        raise ValueError(f"shape {given!r:.60}: expected whole numbers, of a tensor")
    return shape


def _ranks(given: Any) -> int:
    """A rank, or a number of ranks. **Raises**: ValueError for what cannot be one."""
    if type(given) is not int or not 0 <= given <= MOST_RANKS:
        raise ValueError(f"{given!r:.60}: expected a whole number of at most {MOST_RANKS:,}")
    return given


def _dtype(given: Any) -> str:
    """**Raises**: ValueError, TypeError unless it is a dtype's name: NumPy would parse others."""
    if not isinstance(given, str) or not given.isidentifier():
        raise ValueError(f"dtype {given!r:.60}: expected the name of a dtype")
    dtype_of(given)
    return given


def _digest(given: Any) -> str:
    if not isinstance(given, str) or not DIGEST.fullmatch(given):
        raise ValueError(f"digest {given!r:.60}: expected hexadecimal digits")
    return given


def _check_types(fields: Mapping[str, Any]) -> None:
    """**Raises**: ValueError for a field of a call with a value of another type than it has."""
    for name, value in fields.items():
        if name in ("send_counts", "receive_counts"):
            fits = all(type(each) is int for each in value)
        elif name in TEXTS:
            fits = isinstance(value, str) or (value is None and name in ("op", "reduction"))
        else:
            fits = type(value) is int or (value is None and name not in ("rank", "sequence"))
        if not fits:
            raise ValueError(f"{name}={value!r:.60}: a value of another type")


def _messages(events: Iterable[Event]) -> dict[int, Event]:
    """The event that receives a message, by the identity of the one that sends it."""
    ends: dict[Hashable, list[Event]] = {}
    found: dict[int, Event] = {}
    taken: Counter[Hashable] = Counter()
    ordered = sorted(events, key=lambda event: event.first.sequence)
    for event in ordered:
        call = event.first
        if call.operation == "send" and call.number is None:
            ends.setdefault((call.rank, call.peer, call.tag), []).append(event)
    for event in ordered:
        call = event.first
        if call.operation == "recv" and call.number is None:
            key = (call.peer, call.rank, call.tag)
            if taken[key] < len(ends.get(key, ())):
                found[id(ends[key][taken[key]])] = event
                taken[key] += 1
    return found


def _ordered(
    calls: Mapping[tuple[int, int], Call], groups: Mapping[str, tuple[int, ...]]
) -> list[Event]:
    """The events, so that each rank's are in its order; the same order for the same program."""
    events: dict[Any, Event] = {}
    by_rank: dict[int, list[Event]] = {}
    for (rank, sequence), call in sorted(calls.items()):
        message = call.number is None
        key = (rank, sequence) if message else (call.group, call.number)
        ranks = (rank,) if message else groups.get(call.group, (rank,))
        event = events.setdefault(key, Event(0, ranks))
        event.calls[rank] = call
        by_rank.setdefault(rank, []).append(event)
    ahead = {id(event): len(event.calls) for event in events.values()}
    brings = _messages(events.values())
    for received in brings.values():
        ahead[id(received)] += 1
    position = dict.fromkeys(by_rank, 0)
    depth = dict.fromkeys(by_rank, 0)
    ready: list[tuple[int, int, int, Event]] = []
    ordered: list[Event] = []

    def push(event: Event) -> None:
        first = event.first
        level = max(depth[member] for member in event.calls)
        heapq.heappush(ready, (level, first.rank, first.sequence, event))

    def reach(rank: int) -> None:
        """The rank comes to its next event, which is ready if all its ranks have come to it."""
        while position[rank] < len(by_rank[rank]):
            event = by_rank[rank][position[rank]]
            if ahead[id(event)] < 0:  # was taken early
                position[rank] += 1
                continue
            ahead[id(event)] -= 1
            if not ahead[id(event)]:
                push(event)
            return

    for rank in by_rank:
        reach(rank)
    while len(ordered) < len(events):
        if ready:
            event = heapq.heappop(ready)[3]
        else:  # asynchronous calls, which ranks post in different orders
            event = min(
                (by_rank[r][p] for r, p in position.items() if p < len(by_rank[r])),
                key=lambda event: (event.first.sequence, event.first.rank),
            )
        ahead[id(event)] = -1
        event.index = len(ordered)
        ordered.append(event)
        brought = brings.get(id(event))
        if brought is not None and ahead[id(brought)] > 0:  # not taken early
            ahead[id(brought)] -= 1
            if not ahead[id(brought)]:
                push(brought)
        level = 1 + max(depth[rank] for rank in event.calls)
        for rank in event.calls:
            at = position[rank]
            if at < len(by_rank[rank]) and by_rank[rank][at] is event:
                position[rank] += 1
                depth[rank] = level
                reach(rank)
    return ordered
