"""The accesses of streams to memory, and which of them are in no order."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from gpusim.maps.call_site import is_users

from .clocks import Clock

__all__ = ["Access", "Memory", "Place", "access_to", "here"]

MANY = 4096
"""Accesses of one line to one memory from which on the older ones are forgotten."""

ELEMENTS = 1 << 20
"""The most elements of tensors with gaps that are compared one by one."""


class Place(NamedTuple):
    """Where the program accesses memory.

    `is_torchs` says that a module of torch.distributed does it, such as FSDP, and not the program.
    """

    file: str
    line: int
    is_torchs: bool

    @property
    def site(self) -> str:
        return f"{self.file}:{self.line}"


PASSING, USERS, TORCHS = range(3)
OWN = ("torch.distributed", "torch.nn.parallel.")

_kinds: dict[str, int] = {}
"""Whose code a file has. It is the process's: ranks that are threads write the same values."""


def here() -> Place:
    """The place of the operator that is called."""
    frame: Any = sys._getframe(1)
    is_torchs = False
    while frame is not None:
        file = frame.f_code.co_filename
        kind = _kinds.get(file)
        if kind is None:
            kind = _kind_of(frame)
        if kind == USERS:
            return Place(file, frame.f_lineno, is_torchs)
        is_torchs = is_torchs or kind == TORCHS
        frame = frame.f_back
    return Place("unknown line", 0, is_torchs)


def _kind_of(frame: Any) -> int:
    is_own = frame.f_globals.get("__name__", "").startswith(OWN)
    kind = USERS if is_users(frame) else TORCHS if is_own else PASSING
    file = frame.f_code.co_filename
    if not file.startswith("<"):
        _kinds[file] = kind
    return kind


class Access(NamedTuple):
    """An access to the bytes from `start` to `end` of a memory, at a time of its line.

    `shape` and `strides`, in bytes, tell more of a tensor with gaps; without gaps they are empty.
    `call` is the call that makes it, on NCCL's stream.
    """

    time: int
    start: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    width: int
    place: Place
    by: str
    call: Any = None

    @property
    def span(self) -> tuple[Any, ...]:
        return self[1:6]


def access_to(tensor: Tensor, time: int, place: Place, by: str, call: Any = None) -> Access | None:
    """An access to a tensor; None if it has no elements."""
    count = tensor.numel()
    if not count:
        return None
    width = tensor.element_size()
    start = int(tensor.storage_offset()) * width
    if tensor.is_contiguous():
        return Access(time, start, start + count * width, (), (), width, place, by, call)
    dims = zip(map(int, tensor.shape), map(int, tensor.stride()), strict=True)
    steps = [(size, stride) for size, stride in dims if size > 1 and stride]
    count = math.prod(size for size, _ in steps)
    end = start + width * (1 + sum((size - 1) * stride for size, stride in steps))
    if end - start <= count * width:
        return Access(time, start, end, (), (), width, place, by, call)
    shape, strides = zip(*((size, width * stride) for size, stride in steps), strict=True)
    return Access(time, start, end, shape, strides, width, place, by, call)


def _bytes(access: Access) -> Any:
    """The places of all bytes of an access; None if they are too many."""
    if not access.shape:
        shape: tuple[int, ...] = (access.end - access.start,)
        strides: tuple[int, ...] = (1,)
    else:
        shape, strides = (*access.shape, access.width), (*access.strides, 1)
    if np.prod(shape) > ELEMENTS:
        return None
    places = np.array([access.start])
    for size, stride in zip(shape, strides, strict=True):
        places = np.add.outer(places, np.arange(size) * stride).reshape(-1)
    return places


def meet(one: Access, other: Access) -> bool:
    """Whether two accesses to one memory surely share a byte."""
    if one.start >= other.end or other.start >= one.end:
        return False
    if not (one.shape or other.shape) or one.span == other.span:
        return True
    places = _bytes(one), _bytes(other)
    if any(each is None for each in places):
        return False
    return bool(np.isin(*places).any())


Lines = dict[int, dict[tuple[Any, ...], Access]]
"""The last accesses by the key of their line and by their span, of each line the oldest first."""


class Memory:
    """The accesses to the memory of a storage.

    It is an attribute of the storage's Python object, and lives as long as the memory.

    **Attributes**: `on_gpu` says where it is; None if that is not known. `is_pinned` is for memory
    of the host that streams copy to and from by themselves; `is_shared` if a GPU's program would
    have another tensor beside it in memory that is not pinned.
    """

    __slots__ = ("is_pinned", "is_shared", "on_gpu", "owner", "reads", "writes")

    def __init__(self, owner: object, on_gpu: bool | None) -> None:
        self.owner, self.on_gpu = owner, on_gpu
        self.is_pinned = self.is_shared = False
        self.reads: Lines = {}
        self.writes: Lines = {}

    def note(self, line: int, access: Access, is_write: bool) -> None:
        """Note an access of a line."""
        own = (self.writes if is_write else self.reads).setdefault(line, {})
        span = access.span
        own.pop(span, None)
        own[span] = access
        if len(own) > MANY:
            for each in list(own)[: MANY // 2]:
                del own[each]

    def unordered(
        self, line: int | None, access: Access, is_write: bool, clocks: Sequence[Clock]
    ) -> Iterator[tuple[int, Access, bool]]:
        """The last access of each other line that an access runs beside, by what it has waited for.

        **Returns**: the other line, its access, and whether that is a write.
        """
        for others in (self.writes, self.reads) if is_write else (self.writes,):
            if not others or (len(others) == 1 and line in others):
                continue
            for key, accesses in list(others.items()):
                if key == line:
                    continue
                seen = max([clock.get(key, 0) for clock in clocks])
                for other in reversed(accesses.values()):
                    if other.time <= seen:
                        break
                    if meet(other, access):
                        yield key, other, others is self.writes
                        break
