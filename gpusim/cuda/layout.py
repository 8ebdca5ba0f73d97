"""The layout of a launch: where the elements lie, and which thread has which.
It depends only on shapes, strides and the alignment of addresses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpusim.fallback.arguments import check_listed, check_stacked

from .device import Array, Device
from .structs import AXES, LAYOUT, struct

Axes = tuple[tuple[int, int], ...]  # (length, stride in bytes) of each axis


#: Layouts tell addresses apart modulo so many bytes: a multiple of every chunk's length.
ALIGNMENT = 64


class MemberLayout(NamedTuple):
    """How the members of a group lie, without their addresses: what plans of launches depend on.

    **Attributes**:

    - `number`: of members, which differ only in their addresses.
    - `shape`, `strides`, `dtype`: of each.
    - `step`: bytes from one member to the next; None for a list, which may lie anywhere.
    - `offset`: the first address modulo ALIGNMENT.
    - `alike`: the bytes, a power of two of at most 16, modulo which the members' addresses agree.
    """

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    step: int | None
    offset: int
    alike: int

    def turned(self) -> MemberLayout:
        """The layout of the same members, the last one first."""
        if self.step is None:
            return self
        last = (self.offset + (self.number - 1) * self.step) % ALIGNMENT
        return self._replace(step=-self.step, offset=last)


class Members(NamedTuple):
    """The members of one group: where they lie, and the arrays that hold them."""

    layout: MemberLayout
    base: int  # the first one's address
    pointers: list[int] | None  # of a list; None: stacked
    arrays: list[Array]

    @classmethod
    def of(cls, given: Any, device: Device) -> Members:
        """Check the caller's members: ValueError or TypeError names the member that differs."""
        if device.is_array(given):
            shape, strides = given.shape, given.strides
            if not shape or not shape[0]:
                check_stacked(given)
            count, step, base = shape[0], strides[0], device.pointer(given)
            alike = math.gcd(16, step if count > 1 else 0)
            axes = shape[1:], strides[1:]
            layout = MemberLayout(count, *axes, given.dtype, step, base % ALIGNMENT, alike)
            return cls(layout, base, None, [given])
        arrays = list(given)
        for index, array in enumerate(arrays):
            if not device.is_array(array):
                raise TypeError(
                    f"members[{index}] is a {type(array).__name__}: expected an array of the device"
                )
        check_listed(arrays)
        strides = arrays[0].strides
        if any(array.strides != strides for array in arrays):
            arrays = [device.contiguous(array) for array in arrays]
        pointers = [device.pointer(array) for array in arrays]
        first, base = arrays[0], pointers[0]
        alike = math.gcd(16, *(pointer - base for pointer in pointers))
        axes = first.shape, first.strides
        layout = MemberLayout(len(arrays), *axes, first.dtype, None, base % ALIGNMENT, alike)
        return cls(layout, base, pointers, arrays)

    def contiguous(self, device: Device) -> Members:
        """Copies in C order."""
        arrays = [device.contiguous(array) for array in self.arrays]
        return Members.of(arrays[0] if self.pointers is None else arrays, device)

    def table(self, device: Device, *, turned: bool) -> Array | None:
        """The addresses of a list, on the device: of its last member first if it is `turned`."""
        if self.pointers is None:
            return None
        pointers = self.pointers[::-1] if turned else self.pointers
        return device.constant(np.array(pointers, np.uint64).tobytes())


def merged(axes: Axes) -> Axes:
    """Merge neighbouring axes that are evenly strided together; drop axes of length 1."""
    result: list[tuple[int, int]] = []
    for length, stride in reversed(axes):
        if length == 1:
            continue
        if result and stride == result[0][0] * result[0][1]:
            result[0] = (length * result[0][0], result[0][1])
        else:
            result.insert(0, (length, stride))
    return tuple(result)


@dataclass(frozen=True)
class Rows:
    """A member's elements as rows: outer axes, then the elements of a row."""

    outer: Axes  # batch axes, then the value's
    batch: int  # how many batch entries the rows belong to
    length: int
    stride: int

    @property
    def count(self) -> int:
        return math.prod(length for length, _ in self.outer)

    @property
    def too_many_axes(self) -> bool:
        """Whether no layout holds them: the members have to be copied."""
        return len(self.outer) > AXES


def rows_of(members: MemberLayout, batch_ndim: int, itemsize: int, parts: int) -> Rows:
    """A member with its axes merged; `batch_ndim` of these are batch entries of their own.

    `itemsize` is an element's; with 2 `parts` each is half of a complex number.
    """
    axes = tuple(zip(members.shape, members.strides, strict=True))
    tail = ((2, itemsize),) if parts == 2 else ()
    batch = merged(axes[:batch_ndim])
    value = merged((*axes[batch_ndim:], *tail)) or ((1, itemsize),)
    entries = math.prod(members.shape[:batch_ndim])
    return Rows((*batch, *value[:-1]), entries, *value[-1])


def layout_of(
    members: MemberLayout,
    rows: Rows,
    *,
    chunk: int,
    itemsize: int,
    first: int = 0,
    fixed: bool = False,
) -> NDArray[Any]:
    """The struct for chunks of `chunk` elements, without addresses.

    `first` is the index of the first element; `fixed`: chunks begin at multiples of their length,
    as the random numbers' blocks do, and not where the memory is aligned.
    """
    assert ALIGNMENT % (chunk * itemsize) == 0, (chunk, itemsize)
    shift = 0
    if not fixed and members.offset % itemsize == 0:
        shift = (members.offset // itemsize - first) % chunk
    if rows.count == 1:
        chunks = -(-((first + shift) % chunk + rows.length) // chunk)
    elif rows.length % chunk == 0 and (first + shift) % chunk == 0:
        chunks = rows.length // chunk
    else:  # however a row lies to the chunks
        chunks = (rows.length + 2 * chunk - 2) // chunk
    result = struct(
        LAYOUT,
        member_stride=members.step or 0,
        members=members.number,
        alike=members.alike,
        rows=rows.count,
        length=rows.length,
        chunks=chunks,
        stride=rows.stride,
        axes=len(rows.outer),
        rows_of_value=rows.count // rows.batch,
        first=first,
        shift=shift,
    )
    for position, (length, stride) in enumerate(reversed(rows.outer)):
        result["sizes"][position], result["strides"][position] = length, stride
    return result
