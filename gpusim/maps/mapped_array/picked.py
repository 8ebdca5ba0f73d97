"""Views of MappedArrays at mapped integers: row = x[i], which reads and writes x."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import trees
from ...libraries import contiguous, copy_array, owner
from ..axis_environment import Axes, union
from .align import lead, lead_full
from .array import Array, MappedArray, is_scalar, read_only, unpack, wrap
from .dispatch import INDIRECT, writes
from .indices import is_basic, stack_index
from .memory import address, strided, writes_so_far
from .writing import ASSIGNED, assign, axes_of


class Picked(MappedArray):
    """A view ``x[i]`` of a writable array at mapped integers, which no strides describe.

    It reads the array when it is used, and a write goes into the array at the index. Views of it
    are `Within` it.
    """

    __slots__ = ("_found", "_index", "_read", "_source")
    _source: MappedArray
    _index: tuple[Any, ...]
    _read: int
    _found: tuple[Array, Axes]

    def _refresh(self) -> tuple[Array, Axes]:
        if self._read != writes_so_far():
            data, axes = unpack(self._source)
            place = stack_index(self._index, data, axes)
            found = contiguous(place.arrange(data[place.stacked]))
            self._found = read_only(found), place.axes
            self._read = writes_so_far()
        return self._found

    @property
    def _data(self) -> Array:
        return self._refresh()[0]

    @property
    def _axes(self) -> Axes:  # type: ignore[override]
        return self._refresh()[1]

    def view(self, dtype: Any = None) -> Any:
        """The same bits, as another dtype if one is given: a view."""
        return within(self, super().view(dtype))

    def _write(self, changed: MappedArray) -> None:
        self._source[self._index] = changed

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "shape":
            raise ValueError("the shape of a view at mapped indices is read-only: use x.reshape")
        object.__setattr__(self, name, value)


class Within(MappedArray):
    """A view of a `Picked` view, such as its transpose, by the strides of one replica's part."""

    __slots__ = ("_dtype", "_fixed", "_offset", "_picked", "_shape", "_strides")
    _picked: Picked
    _offset: int
    _shape: tuple[int, ...]
    _strides: tuple[int, ...]
    _dtype: np.dtype[Any]
    _fixed: bool

    def _view(self, whole: Array, axes: Axes) -> Array:
        mapped = len(axes)
        shape = (*whole.shape[:mapped], *self._shape)
        strides = (*whole.strides[:mapped], *self._strides)
        return strided(whole, self._dtype, shape, strides, self._offset)

    @property
    def _data(self) -> Array:
        return self._view(*self._picked._refresh())

    @property
    def _axes(self) -> Axes:  # type: ignore[override]
        return self._picked._axes

    def view(self, dtype: Any = None) -> Any:
        """The same bits, as another dtype if one is given: a view."""
        return within(self, super().view(dtype))

    def _write(self, changed: MappedArray) -> None:
        if self._fixed:
            raise ValueError(f"{ASSIGNED} is read-only: change a copy (x = x.copy())")
        axes = union(self._axes, axes_of(changed))
        whole = copy_array(lead_full(self._picked, axes))
        part = self._view(whole, axes)
        assign(part, ..., lead(changed, axes, changed.ndim))
        self._picked._write(wrap(whole, axes))


FIXED = frozenset({np.diagonal, np.diag, np.broadcast_to, np.broadcast_arrays})
"""Functions whose views are read-only."""


@writes("views")
def within(source: MappedArray, result: Any, called: Any = None) -> Any:
    """`result`, with its arrays that are views of `source`, a view at mapped indices, made `Within`
    that."""
    data, axes = unpack(source)
    picked = source if isinstance(source, Picked) else source._picked  # type: ignore[attr-defined]
    fixed = called in FIXED or getattr(source, "_fixed", False)

    def followed(leaf: Any) -> Any:
        if not isinstance(leaf, MappedArray) or is_scalar(leaf) or type(leaf) in INDIRECT:
            return leaf
        part, own = unpack(leaf)
        if own != axes or owner(part) is not owner(data) or part.dtype.hasobject:
            return leaf
        view = object.__new__(Within)
        view._picked, view._fixed, view._dtype = picked, fixed, part.dtype
        view._offset = address(part) - address(unpack(picked)[0])
        view._shape, view._strides = part.shape[len(axes) :], part.strides[len(axes) :]
        return view

    return trees.map(followed, result)


def pick(source: MappedArray, index: tuple[Any, ...]) -> Picked:
    """The view of a writable `source` at integers some of which are mapped."""
    view = object.__new__(Picked)
    if type(source) not in INDIRECT:
        source = wrap(*unpack(source))  # keeps its shape if source.shape is set
    view._source, view._index, view._read = source, index, -1
    return view


def is_picked(index: tuple[Any, ...]) -> bool:
    """Whether NumPy returns a view for the index: its only arrays are mapped scalars."""
    return all(
        is_basic((entry,))
        or isinstance(entry, np.integer)
        or (is_scalar(entry) and entry.dtype.kind in "iu")
        for entry in index
    )


INDIRECT.update((Picked, Within))
trees.LEAF_TYPES.update(INDIRECT)
