"""The layout of a launch: where the elements lie, and which thread has which.
It depends only on shapes, strides and addresses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fallback.arguments import check_listed, check_stacked

from .device import Array, Device
from .structs import AXES, LAYOUT, struct

Axes = tuple[tuple[int, int], ...]  # (length, stride in bytes) of each axis


@dataclass(frozen=True)
class Members:
    """The members of one group: equal-shaped, and equally strided, wherever each lies."""

    arrays: list[Array]  # those that hold the memory
    pointers: list[int] | None  # of a list; None: stacked
    base: int
    stride: int
    count: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, given: Any, device: Device) -> Members:
        """Check the caller's members: ValueError or TypeError names the member that differs."""
        if device.is_array(given):
            check_stacked(given)
            shape, strides = given.shape[1:], given.strides[1:]
            base, step, count = device.pointer(given), given.strides[0], len(given)
            return cls([given], None, base, step, count, shape, strides, given.dtype)
        arrays = list(given)
        for index, array in enumerate(arrays):
            if not device.is_array(array):
                raise TypeError(
                    f"members[{index}] is a {type(array).__name__}: expected an array of the device"
                )
        check_listed(arrays)
        if any(array.strides != arrays[0].strides for array in arrays):
            arrays = [device.contiguous(array) for array in arrays]
        pointers = [device.pointer(array) for array in arrays]
        first = arrays[0]
        return cls(
            arrays, pointers, pointers[0], 0, len(arrays), first.shape, first.strides, first.dtype
        )

    def turned(self) -> Members:
        """The same members, the last one first."""
        pointers = None if self.pointers is None else self.pointers[::-1]
        last = self.base + (self.count - 1) * self.stride
        base = last if pointers is None else pointers[0]
        return replace(self, pointers=pointers, base=base, stride=-self.stride)

    def contiguous(self, device: Device) -> Members:
        """Copies in C order, for arrays of too many unmergeable axes."""
        arrays = [device.contiguous(array) for array in self.arrays]
        return Members.of(arrays[0] if self.pointers is None else arrays, device)

    @property
    def alike(self) -> bool:
        """Whether the members' addresses agree modulo 16 bytes."""
        if self.pointers is None:
            return self.stride % 16 == 0 or self.count == 1
        return all((pointer - self.base) % 16 == 0 for pointer in self.pointers)


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


def laid_out(
    device: Device, members: Members, batch_ndim: int, itemsize: int, parts: int
) -> tuple[Members, Rows]:
    """The members with their axes merged; `batch_ndim` of these are batch entries of their own.

    `itemsize` is an element's; with 2 `parts` each is half of a complex number. Members of more
    axes than a layout has are copied.
    """
    rows = _rows_of(members, batch_ndim, itemsize, parts)
    if len(rows.outer) > AXES:
        members = members.contiguous(device)
        rows = _rows_of(members, batch_ndim, itemsize, parts)
    return members, rows


def _rows_of(members: Members, batch_ndim: int, itemsize: int, parts: int) -> Rows:
    axes = tuple(zip(members.shape, members.strides, strict=True))
    tail = ((2, itemsize),) if parts == 2 else ()
    batch = merged(axes[:batch_ndim])
    value = merged((*axes[batch_ndim:], *tail)) or ((1, itemsize),)
    entries = math.prod(members.shape[:batch_ndim])
    return Rows((*batch, *value[:-1]), entries, *value[-1])


def layout_of(
    members: Members,
    rows: Rows,
    out: int,
    *,
    chunk: int,
    itemsize: int,
    table: int = 0,
    first: int = 0,
    fixed: bool = False,
) -> NDArray[Any]:
    """The struct for chunks of `chunk` elements.

    `first` is the index of the first element; `fixed`: chunks begin at multiples of their length,
    as the random numbers' blocks do, and not where the memory is aligned.
    """
    shift = 0
    if not fixed and members.base % itemsize == 0:
        shift = (members.base // itemsize - first) % chunk
    if rows.count == 1:
        chunks = -(-((first + shift) % chunk + rows.length) // chunk)
    elif rows.length % chunk == 0 and (first + shift) % chunk == 0:
        chunks = rows.length // chunk
    else:  # however a row lies to the chunks
        chunks = (rows.length + 2 * chunk - 2) // chunk
    result = struct(
        LAYOUT,
        base=members.base,
        table=table,
        member_stride=members.stride,
        members=members.count,
        alike=members.alike,
        rows=rows.count,
        length=rows.length,
        chunks=chunks,
        stride=rows.stride,
        axes=len(rows.outer),
        rows_of_value=rows.count // rows.batch,
        first=first,
        shift=shift,
        out=out,
    )
    for position, (length, stride) in enumerate(reversed(rows.outer)):
        result["sizes"][position], result["strides"][position] = length, stride
    return result
