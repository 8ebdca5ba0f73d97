"""Translation of one replica's index expression into an index of stacked data.

For reading (rules/indexing.py) and for changed copies (updates.py).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...libraries import on_device, to_host, to_library_of
from ..axis_environment import Axes, union
from .align import common_axes, lead, sizes, visible_ndim, visible_shape
from .array import Array, MappedArray, unpack, wrap
from .dispatch import NoRule

BASIC = frozenset({int, np.int64, np.int32, slice, type(None), type(Ellipsis)})
"""Types of the entries of an index that selects a view; compared exactly, as bool is an int."""

Entry = (
    Any  # None, Ellipsis, a slice, an int, a bool (a mask without axes), or an array of integers
)


@dataclass(frozen=True)
class StackedIndex:
    """An index expression for stacked data, and the order of axes in what it selects.

    **Attributes**:

    - `stacked`: the index of the stacked data.
    - `axes`: the mapped axes of the result, outermost first.
    - `shape`: the result's shape as one replica sees it.
    - `block`: the first of the axes in `shape` that index arrays made, and their number.
    - `found`: how many axes of NumPy's result come before the mapped ones.
    """

    stacked: tuple[Any, ...]
    axes: Axes
    shape: tuple[int, ...]
    block: tuple[int, int] = (0, 0)
    found: int = 0

    def arrange(self, result: Array) -> Array:
        """NumPy's result, mapped axes leading and visible ones as one replica sees them: a view."""
        count = len(self.axes)
        if self.found:
            return np.moveaxis(result, range(self.found, self.found + count), range(count))
        here, there = self._block_axes()
        return np.moveaxis(result, here, there) if here != there else result

    def disarrange(self, value: Array) -> Array:
        """The opposite of `arrange`, for values to be written; `found` must be 0."""
        here, there = self._block_axes()
        return np.moveaxis(value, there, here) if here != there else value

    def _block_axes(self) -> tuple[range, range]:
        """The index arrays' axes where NumPy returns them, and where one replica sees them."""
        count, (first, ndim) = len(self.axes), self.block
        start = count if count else first
        return range(start, start + ndim), range(count + first, count + first + ndim)


def as_tuple(index: Any) -> tuple[Any, ...]:
    """The entries of an index expression."""
    return index if isinstance(index, tuple) else (index,)


def is_basic(index: tuple[Any, ...]) -> bool:
    """Whether `index` has only plain ints, slices with plain bounds, None and Ellipsis."""
    return all(
        type(entry) in BASIC
        and not (
            type(entry) is slice and any(isinstance(bound, MappedArray) for bound in _bounds(entry))
        )
        for entry in index
    )


def _bounds(entry: slice) -> tuple[Any, Any, Any]:
    return entry.start, entry.stop, entry.step


def stack_basic(index: tuple[Any, ...], mapped: int) -> tuple[Any, ...]:
    """The basic `index` for data with `mapped` leading axes; it finds arrays, never scalars."""
    end = () if any(entry is Ellipsis for entry in index) else (Ellipsis,)
    return (slice(None),) * mapped + index + end


def stack_index(index: tuple[Any, ...], data: Array, axes: Axes) -> StackedIndex:
    """The stacked index for `index` of `data`, whose leading axes are `axes`.

    **Raises**:

    - NoRule: if NumPy refuses the index, masks select unequal numbers of elements, or the index is
      not supported. The per-replica fallback then raises the error.
    - TypeError: if the bounds of a slice may differ between replicas.
    """
    shape = data.shape[len(axes) :]
    entries = _without_masks(_expand([_entry(entry) for entry in index], len(shape)), shape)
    rest, arrays, first = _survey(entries, shape)
    if not arrays:
        return StackedIndex(stack_basic(tuple(entries), len(axes)), axes, tuple(rest))
    try:
        block = np.broadcast_shapes(*(visible_shape(array) for array in arrays))
    except ValueError:
        raise NoRule from None
    every = union(axes, common_axes(arrays))
    stacked: list[Any] = [_all_along(mapped_axis, every, len(block), data) for mapped_axis in axes]
    stacked += [
        lead(entry, every, len(block)) if isinstance(entry, MappedArray) else entry
        for entry in entries
    ]
    return StackedIndex(
        tuple(stacked),
        every,
        (*rest[:first], *block, *rest[first:]),
        (first, len(block)),
        0 if axes else first,
    )


def _all_along(mapped_axis: Any, axes: Axes, ndim: int, data: Array) -> Array:
    """The index array that selects each replica's own part, beside others of `ndim` axes."""
    shape = [1] * (len(axes) + ndim)
    shape[axes.index(mapped_axis)] = mapped_axis.size
    return np.arange(mapped_axis.size, like=data).reshape(shape)


def _survey(entries: list[Entry], shape: tuple[int, ...]) -> tuple[list[int], list[Any], int]:
    """The lengths of the axes from slices and None, the index arrays, and their axes' position.

    If index arrays and ints are adjacent, their axes stay in place, otherwise they come first.
    """
    rest: list[int] = []
    arrays: list[Any] = []
    axis = runs = before = 0
    running = False
    for entry in entries:
        selects = not (entry is None or entry is Ellipsis or isinstance(entry, slice))
        if selects and not running:
            runs += 1
            before = len(rest)
        running = selects
        if entry is None:
            rest.append(1)
        elif isinstance(entry, slice):
            rest.append(len(range(*entry.indices(shape[axis]))))
        elif isinstance(entry, bool):
            arrays.append(np.zeros(int(entry), np.intp))
        elif entry is not Ellipsis and not isinstance(entry, int):
            arrays.append(entry)
        axis += _consumed(entry)
    return rest, arrays, before if runs == 1 else 0


def _consumed(entry: Entry) -> int:
    """The number of axes of the array that an entry indexes."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    if isinstance(entry, (int, slice)):
        return 1
    return visible_ndim(entry) if entry.dtype == np.bool_ else 1


def _expand(entries: list[Entry], ndim: int) -> list[Entry]:
    """`entries` for all axes: after Ellipsis come the slices that it abbreviates."""
    missing = ndim - sum(_consumed(entry) for entry in entries)
    places = [place for place, entry in enumerate(entries) if entry is Ellipsis]
    if missing < 0 or len(places) > 1:
        raise NoRule
    after = places[0] + 1 if places else len(entries)
    return entries[:after] + [slice(None)] * missing + entries[after:]


def _without_masks(entries: list[Entry], shape: tuple[int, ...]) -> list[Entry]:
    """`entries` with each mask replaced by the indices that it selects."""
    found: list[Entry] = []
    axis = 0
    for entry in entries:
        after = axis + _consumed(entry)
        if _consumed(entry) and not isinstance(entry, (int, slice)) and entry.dtype == np.bool_:
            if visible_shape(entry) != shape[axis:after]:
                raise NoRule
            found += nonzero(entry)
        else:
            found.append(entry)
        axis = after
    return found


def nonzero(value: Any) -> tuple[Any, ...]:
    """np.nonzero(value) of an array with visible axes, of each replica where it is mapped.

    **Raises**:

    - NoRule: if the replicas have different numbers of nonzero elements.
    """
    data, axes = unpack(value)
    if not axes:
        return tuple(np.nonzero(data))
    counts = np.count_nonzero(data, axis=tuple(range(len(axes), data.ndim)))
    counts = to_host(counts)
    count = int(counts.flat[0])
    if (counts != count).any():
        raise NoRule
    shape = (*sizes(axes), count)
    return tuple(wrap(places.reshape(shape), axes) for places in np.nonzero(data)[len(axes) :])


def _entry(entry: Any) -> Entry:
    """One entry of an index expression in its normal form."""
    if entry is None or entry is Ellipsis:
        return entry
    if isinstance(entry, slice):
        return _plain_slice(entry)
    if isinstance(entry, (bool, np.bool_)):
        return bool(entry)
    if isinstance(entry, (list, tuple)):
        entry = index_array(entry)
    if not hasattr(entry, "dtype"):
        if not hasattr(entry, "__index__"):
            raise NoRule
        return operator.index(entry)
    return _array_entry(entry)


def _array_entry(entry: Any) -> Entry:
    data, axes = unpack(entry)
    if data.dtype.kind not in "biu":
        raise NoRule
    if data.ndim > len(axes):
        return entry if axes else data
    if data.dtype.kind == "b":
        flags = to_host(data)
        if not (flags == flags.flat[0]).all():
            raise NoRule
        return bool(flags.flat[0])
    return entry if axes else operator.index(to_host(data))


def index_array(items: Any) -> Any:
    """Nested sequences of indices as one array, a MappedArray when one is among them.

    An empty one selects nothing, so its dtype is an integer's.
    """
    if _holds_mapped(items):
        parts = [index_array(item) for item in items]
        gpu = next((data for data, _ in map(unpack, parts) if on_device(data)), None)
        if gpu is not None:
            parts = [
                part if isinstance(part, MappedArray) else to_library_of(gpu, part)
                for part in parts
            ]
        return np.stack(parts)
    array = items if isinstance(items, MappedArray) or on_device(items) else np.asarray(items)
    return array.astype(np.intp) if isinstance(items, (list, tuple)) and array.size == 0 else array


def _holds_mapped(items: Any) -> bool:
    """Whether an array that NumPy does not see into is among the items."""
    return isinstance(items, (list, tuple)) and any(
        isinstance(item, MappedArray) or on_device(item) or _holds_mapped(item) for item in items
    )


def _plain_slice(entry: slice) -> slice:
    for bound in _bounds(entry):
        if isinstance(bound, MappedArray) and unpack(bound)[1]:
            names = ", ".join(repr(name) for name in bound.mapped_axes)
            raise TypeError(
                f"a slice bound is mapped over {names} and may differ between replicas, as the "
                "length of the slice then may: for a window of fixed length n that begins at i, "
                "index with i + np.arange(n), or run the function under gpusim.pmap"
            )
    return slice(*(bound if bound is None else operator.index(bound) for bound in _bounds(entry)))
