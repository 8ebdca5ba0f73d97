"""The members of one group: equal-shaped arrays, stacked in one array or listed one by one.
They are only viewed; nothing here copies more than the requested block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arguments import check_listed, check_stacked
from .formats import real_of
from .layout import Index


class Members:
    """Views of `count` members, each of `shape` and `dtype`; `stacked` if they lie in one array.

    `strides` are the distinct ones that occur among them. `table` has the addresses of members that
    are not stacked, where they are known already.
    """

    __slots__ = ("arrays", "count", "dtype", "shape", "stacked", "strides", "table")

    def __init__(self, arrays: NDArray[Any] | list[NDArray[Any]]) -> None:
        self.arrays: Any = arrays
        self.count = len(arrays)
        self.table: NDArray[np.uint64] | None = None
        if isinstance(arrays, np.ndarray):
            self.stacked, self.shape, self.dtype = True, arrays.shape[1:], arrays.dtype
            self.strides: tuple[tuple[int, ...], ...] = (arrays.strides[1:],)
        else:
            self.stacked, self.shape, self.dtype = False, arrays[0].shape, arrays[0].dtype
            self.strides = tuple(sorted({array.strides for array in arrays}))

    @classmethod
    def of(cls, members: NDArray[Any] | Sequence[NDArray[Any]] | Members) -> Members:
        """Check the caller's members: ValueError or TypeError names the member that differs."""
        if isinstance(members, Members):
            return members
        if isinstance(members, np.ndarray):
            if not members.ndim or not len(members):
                check_stacked(members)
            return cls(members)
        arrays = [np.asarray(member) for member in members]
        check_listed(arrays)
        return cls(arrays)

    def reshape(self, shape: tuple[int, ...]) -> Members:
        """The same elements under another shape, which must be reachable without a copy."""
        if isinstance(self.arrays, np.ndarray):
            return Members(self.arrays.reshape((self.count, *shape)))
        return Members([array.reshape(shape) for array in self.arrays])

    def as_reals(self) -> Members:
        """Complex members seen as real ones with a new last axis: real and imaginary part."""
        real = real_of(self.dtype)
        if isinstance(self.arrays, np.ndarray):
            return Members(self.arrays[..., np.newaxis].view(real))
        return Members([array[..., np.newaxis].view(real) for array in self.arrays])

    def addresses(self, *, turned: bool) -> tuple[int, NDArray[np.uint64] | None, int]:
        """Where the members lie: the first one's address and the bytes from each to the next; of a
        list a table of all addresses. `turned`: the last member comes first."""
        if isinstance(self.arrays, np.ndarray):
            base, step = self.arrays.ctypes.data, self.arrays.strides[0]
            return (base + (self.count - 1) * step, None, -step) if turned else (base, None, step)
        table = self.table
        if table is None:
            table = np.array([array.ctypes.data for array in self.arrays], np.uint64)
        return 0, table[::-1].copy() if turned else table, 0

    def block(self, member: int, index: Index) -> NDArray[Any]:
        """A view of one member's block."""
        array: NDArray[Any] = self.arrays[member]
        return array[index]

    def rows(self, members: slice, index: Index) -> NDArray[Any] | list[NDArray[Any]]:
        """The block of a range of members: one view of a stacked array, else a list of views."""
        if isinstance(self.arrays, np.ndarray):
            view: NDArray[Any] = self.arrays[(members, *index)]
            return view
        return [array[index] for array in self.arrays[members]]

    def gather(self, chosen: NDArray[np.intp], index: Index) -> NDArray[Any]:
        """A copy of the block; `chosen` (rows, *block) holds the member of each element."""
        rows = self.rows(slice(None), index)
        stacked = rows if isinstance(rows, np.ndarray) else np.stack(rows)
        return np.take_along_axis(stacked, chosen, axis=0)
