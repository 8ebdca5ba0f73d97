"""Memory layouts in which NumPy's stacked operations add in the order of one replica's operation.

NumPy takes axes in the order of their strides. While mapped axes have the largest strides it works
through one replica after the other, each as if it were alone (checked with NumPy 2.0 to 2.4, for
buffered casts too). Libraries of GPUs have no such order to keep.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ...libraries import on_device
from .array import Array


class NoLayout(Exception):
    """No copy of the stacked data makes NumPy add as it does for one replica."""


def _strides(data: Array, start: int, stop: int | None = None) -> list[int]:
    """The strides of the axes longer than one element."""
    places = range(start, data.ndim if stop is None else stop)
    return [data.strides[place] for place in places if data.shape[place] > 1]


def is_replica_major(data: Array, mapped: int) -> bool:
    """Whether the strides of the `mapped` leading axes are at least those of all other axes."""
    if mapped == 0 or data.flags.c_contiguous or on_device(data):
        return True
    largest = max(map(abs, _strides(data, mapped)), default=0)
    return all(stride == 0 or abs(stride) >= largest for stride in _strides(data, 0, mapped))


def _spaced_like_one_replica(data: Array, mapped: int) -> bool:
    """Whether neighbours of one replica lie next to each other."""
    return min(map(abs, _strides(data, mapped)), default=0) == data.dtype.itemsize


def copy_with_gaps(data: Array) -> Array:
    """A copy with gaps between the elements, for which NumPy does not use its contiguous loops."""
    room = np.empty_like(data, shape=(*data.shape, 2))
    room[..., 0] = data
    return room[..., 0]


def copy_replica_major(data: Array, mapped: int, axis_count: int = 1) -> Array:
    """`data`, or a copy, whose visible axes NumPy reduces as it would those of one replica.

    **Arguments**:

    - `data`: the stacked array, its `mapped` first axes mapped.
    - `mapped`: how many axes are mapped.
    - `axis_count`: how many visible axes are reduced at once.

    **Raises**:

    - NoLayout: when one replica's part has a layout that no copy keeps.
    """
    if is_replica_major(data, mapped):
        return data
    visible = range(mapped, data.ndim)
    order = sorted(visible, key=lambda place: -abs(data.strides[place]))
    long = [place for place in order if data.shape[place] > 1]
    merges = all(
        data.strides[outer] == data.strides[inner] * data.shape[inner]
        for outer, inner in pairwise(long)
    )
    if 0 in _strides(data, mapped) or not (merges or axis_count == 1):
        raise NoLayout
    forward = [*range(mapped), *order]
    moved = np.transpose(data, forward)
    copied = (
        np.ascontiguousarray(moved)
        if _spaced_like_one_replica(data, mapped)
        else copy_with_gaps(moved)
    )
    return np.transpose(copied, sorted(range(data.ndim), key=forward.__getitem__))


def is_interleaved(data: Array, mapped: int) -> bool:
    """Whether neighbours in memory are elements of different replicas, in NumPy's arrays."""
    if on_device(data):
        return False
    own = [abs(stride) for stride in _strides(data, mapped) if stride]
    others = [abs(stride) for stride in _strides(data, 0, mapped) if stride]
    return bool(others) and (not own or min(others) < min(own))
