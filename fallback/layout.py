"""Cutting a value into blocks that stay in cache: axes merged where strides allow, then boxes.
A box is a tuple of slices, one for each axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Index = tuple[slice, ...]


def coalesce(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Merge neighbouring axes that are evenly strided in all `strides`; drop axes of length 1."""
    merged: list[int] = []
    inner: list[int] = []  # the strides of the axis merged[0]
    for axis in reversed(range(len(shape))):
        if shape[axis] == 1:
            continue
        here = [row[axis] for row in strides]
        if merged and all(a == b * merged[0] for a, b in zip(here, inner, strict=True)):
            merged[0] *= shape[axis]
        else:
            merged.insert(0, shape[axis])
            inner = here
    return tuple(merged)


def split(box: Index, limit: int) -> Iterator[Index]:
    """Cut `box` into boxes of at most `limit` elements, in C order."""
    lengths = [part.stop - part.start for part in box]
    axis = len(box)
    inner = 1
    while axis and inner * lengths[axis - 1] <= limit:
        axis -= 1
        inner *= lengths[axis]
    if not axis:
        yield box
        return
    axis -= 1
    step = max(1, limit // inner)
    for outer in _elements(box[:axis]):
        for start in range(box[axis].start, box[axis].stop, step):
            stop = min(start + step, box[axis].stop)
            yield (*outer, slice(start, stop), *box[axis + 1 :])


def _elements(box: Index) -> Iterator[Index]:
    if not box:
        yield ()
        return
    for start in range(box[0].start, box[0].stop):
        for rest in _elements(box[1:]):
            yield (slice(start, start + 1), *rest)


def flat_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Index]:
    """The boxes that make up elements start..stop-1 of the flattened shape, in C order."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    first, skipped = divmod(start, inner)
    last, rest = divmod(stop, inner)
    if first == last:
        for box in flat_range(shape[1:], skipped, rest):
            yield (slice(first, first + 1), *box)
        return
    if skipped:
        for box in flat_range(shape[1:], skipped, inner):
            yield (slice(first, first + 1), *box)
        first += 1
    if first < last:
        yield (slice(first, last), *(slice(0, length) for length in shape[1:]))
    for box in flat_range(shape[1:], 0, rest):
        yield (slice(last, last + 1), *box)


def whole(shape: Sequence[int]) -> Index:
    """The box of all elements."""
    return tuple(slice(0, length) for length in shape)
