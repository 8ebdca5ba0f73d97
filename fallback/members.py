"""The members of one group: equal-shaped arrays, stacked in one array or listed one by one.
They are only viewed; nothing here copies more than the requested block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fallback.arguments import check_listed, check_stacked
from fallback.formats import real_of
from fallback.layout import Index


class Members:
    """Views of `count` members, each of `shape` and `dtype`."""

    #: The distinct strides that occur among the members, as the caller gave them.
    strides: tuple[tuple[int, ...], ...]

    def __init__(self, arrays: NDArray[Any] | list[NDArray[Any]]) -> None:
        self._arrays = arrays
        self.count = len(arrays)
        #: Whether the members lie in one array.
        self.stacked = isinstance(arrays, np.ndarray)
        if isinstance(arrays, np.ndarray):
            self.shape, self.dtype = arrays.shape[1:], arrays.dtype
        else:
            self.shape, self.dtype = arrays[0].shape, arrays[0].dtype

    @classmethod
    def of(cls, members: NDArray[Any] | Sequence[NDArray[Any]]) -> Members:
        """Check the caller's members: ValueError or TypeError names the member that differs."""
        if isinstance(members, np.ndarray):
            if not members.ndim or not len(members):
                check_stacked(members)
            group = cls(members)
            group.strides = (members.strides[1:],)
            return group
        arrays = [np.asarray(member) for member in members]
        check_listed(arrays)
        group = cls(arrays)
        group.strides = tuple(sorted({array.strides for array in arrays}))
        return group

    def reshape(self, shape: tuple[int, ...]) -> Members:
        """The same elements under another shape, which must be reachable without a copy."""
        if isinstance(self._arrays, np.ndarray):
            return Members(self._arrays.reshape((self.count, *shape)))
        return Members([array.reshape(shape) for array in self._arrays])

    def as_reals(self) -> Members:
        """Complex members seen as real ones with a new last axis: real and imaginary part."""
        real = real_of(self.dtype)
        if isinstance(self._arrays, np.ndarray):
            return Members(self._arrays[..., np.newaxis].view(real))
        return Members([array[..., np.newaxis].view(real) for array in self._arrays])

    def block(self, member: int, index: Index) -> NDArray[Any]:
        """A view of one member's block."""
        array: NDArray[Any] = self._arrays[member]
        return array[index]

    def rows(self, members: slice, index: Index) -> NDArray[Any] | list[NDArray[Any]]:
        """The block of a range of members: one view of a stacked array, else a list of views."""
        if isinstance(self._arrays, np.ndarray):
            view: NDArray[Any] = self._arrays[members][(slice(None), *index)]
            return view
        return [array[index] for array in self._arrays[members]]

    def gather(self, chosen: NDArray[np.intp], index: Index) -> NDArray[Any]:
        """A copy of the block; `chosen` (rows, *block) holds the member of each element."""
        rows = self.rows(slice(None), index)
        stacked = rows if isinstance(rows, np.ndarray) else np.stack(rows)
        return np.take_along_axis(stacked, chosen, axis=0)
