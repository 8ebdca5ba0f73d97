"""ragged_copy on a device: checks, then one launch that copies all segments of all replicas.
The contract is fallback.ragged_copy's; here the device checks the segments too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .device import Array, Device, Kernel, Launch
from .structs import RAGGED, ROWS, struct

UNITS, THREADS = 4, 256  # accesses that a thread of the copy has under way, and a block's threads
TILES = Kernel("ragged.cu", f"ragged_tiles<{UNITS}>")
UNIT_NAMES = {1: "u8", 2: "u16", 4: "u32", 8: "uint2", 16: "uint4"}
NO_FAULT = (1 << 64) - 1


def ragged_copy(device: Device, sources: Any, output: Any, segments: NDArray[np.int64]) -> None:
    """`fallback.ragged_copy` for arrays of `device`.

    ValueError, before anything is written, where a segment leaves its arrays or two overlap in
    one destination; the message says which.
    """
    table = np.asarray(segments, np.int64).reshape(-1, 5)
    table = np.ascontiguousarray(table[table[:, 4] != 0])
    row = sources.shape[2:] if device.is_array(sources) else sources[0].shape[1:]
    dtype = sources.dtype if device.is_array(sources) else sources[0].dtype
    row_bytes = math.prod(row) * dtype.itemsize
    if not len(table) or not row_bytes:
        return
    source, kept = _side(device, sources, row, writable=False)
    destination, more = _side(device, output, row, writable=True)
    kept += more
    width = _width(row_bytes, source, destination, kept)
    ends = np.cumsum(table[:, 4])
    order = np.lexsort((table[:, 3], table[:, 2]))
    uploaded = [device.upload(part) for part in (table, ends, order)]
    fault = device.upload(np.array([NO_FAULT], np.uint64))
    arguments = struct(
        RAGGED,
        source=source,
        destination=destination,
        fault=device.pointer(fault),
        count=len(table),
        row_units=row_bytes // width,
    )
    for name, array in zip(("segments", "ends", "order"), uploaded, strict=True):
        arguments[name] = device.pointer(array)
    device.run(Launch(Kernel("ragged.cu", "ragged_check"), arguments, len(table)))
    found = int(device.download(fault)[0])
    if found != NO_FAULT:
        raise ValueError(_complaint(found, table, order))
    units = int(ends[-1]) * (row_bytes // width)
    count = -(-units // (UNITS * THREADS))
    tiles = device.empty((count + 1, 2), np.int64)
    arguments["units"], arguments["tiles"] = units, device.pointer(tiles)
    device.run(Launch(TILES, arguments, count + 1, THREADS))
    device.run(Launch(template(width), arguments, -(-units // UNITS), THREADS))


def template(width: int) -> Kernel:
    """The copy by accesses of `width` bytes."""
    return Kernel("ragged.cu", f"ragged_copy<{UNIT_NAMES[width]}, {UNITS}>")


def _side(
    device: Device, given: Any, row: tuple[int, ...], *, writable: bool
) -> tuple[NDArray[Any], list[Any]]:
    """The struct for the sources or the destinations, and what has to stay alive for it."""
    if device.is_array(given):
        array = given
        if not _rows_contiguous(array.shape[2:], array.strides[2:], array.dtype.itemsize):
            array = _contiguous(device, array, writable)
        pitch = array.strides[1]
        base, stride = device.pointer(array), array.strides[0]
        count = array.shape[1]
        side = struct(ROWS, base=base, stride=stride, pitch=pitch, replicas=len(array), count=count)
        return side, [array, base, stride]
    arrays = list(given)
    same = len({array.strides[0] for array in arrays}) == 1
    for index, array in enumerate(arrays):
        if not same or not _rows_contiguous(row, array.strides[1:], array.dtype.itemsize):
            arrays[index] = _contiguous(device, array, writable)
    pointers = [device.pointer(array) for array in arrays]
    table = device.upload(np.array(pointers, np.uint64))
    counts = device.upload(np.array([len(array) for array in arrays], np.int64))
    pitch = math.prod(row) * arrays[0].dtype.itemsize if not same else arrays[0].strides[0]
    side = struct(
        ROWS,
        table=device.pointer(table),
        pitch=pitch,
        replicas=len(arrays),
        counts=device.pointer(counts),
    )
    return side, [table, counts, arrays, *pointers]


def _contiguous(device: Device, array: Array, writable: bool) -> Array:
    if writable:
        raise ValueError("output: expected arrays whose rows are contiguous, one after the other")
    return device.contiguous(array)


def _rows_contiguous(row: tuple[int, ...], strides: Sequence[int], itemsize: int) -> bool:
    expected = itemsize
    for length, stride in zip(reversed(row), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _width(row_bytes: int, source: NDArray[Any], destination: NDArray[Any], kept: Any) -> int:
    """The widest access, up to 16 bytes, to which every row of every replica is aligned."""
    numbers = [row_bytes, int(source["pitch"]), int(destination["pitch"])]
    numbers += [number for number in kept if isinstance(number, int)]
    return math.gcd(16, *numbers)


def _complaint(found: int, table: NDArray[np.int64], order: NDArray[np.int64]) -> str:
    segment, overlaps = divmod(found, 2)
    source, start, destination, to, rows = table[segment].tolist()
    what = (
        f"segment of {rows} rows from row {start} of source {source} to row {to} of "
        f"destination {destination}"
    )
    if overlaps:
        before = int(order[int(np.nonzero(order == segment)[0][0]) - 1])
        _, _, _, other, length = table[before].tolist()
        return f"segments overlap: {what}, and one that writes its rows {other}:{other + length}"
    return f"{what}: leaves its arrays"
