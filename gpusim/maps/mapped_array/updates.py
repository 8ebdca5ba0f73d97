"""Changed copies of arrays, which stay as they are: x.at[index].set(value).

For plain arrays gpusim.at(x)[index].set(value).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from ...collectives.kernels import convert
from ...libraries import as_bits, contiguous, copy_array, lacks_kernels, on_device, to_library_of
from ..axis_environment import Axes
from .align import common_axes, lead, lead_full, sizes, visible_ndim
from .array import Array, MappedArray, wrap
from .dispatch import NoRule
from .indices import StackedIndex, as_tuple, is_basic, stack_basic, stack_index
from .per_replica import call_per_replica
from .settings import fallback_settings

Write = Callable[..., None]
"""Changes an array: write(array, index, value), or write(array, index) where no value is needed."""


def at(x: Any) -> At:
    """Changed copies of `x`: ``at(x)[index].set(value)``; of MappedArrays also ``x.at[index]``.

    The index may be all that NumPy's may be, and both the index and the value may be MappedArrays
    (the result then is one, over all axes together). The value is converted to the dtype of `x` and
    broadcast as by NumPy's assignment. `x` itself stays as it is.

    ``at(table)[i].get()`` is also how a plain array is read at a MappedArray `i`, which
    ``table[i]`` and ``np.take(table, i)`` cannot do.

    **Arguments**:

    - `x`: an array, plain (read-only ones, as in pmap, too) or a MappedArray.

    **Returns**: An object to be indexed: ``at(x)[index]`` has the methods `set`, `add`,
    `subtract`, `multiply`, `divide`, `power`, `min`, `max`, `apply` and `get`.

    **Raises**:

    - IndexError: by the methods, for an index out of range (where JAX drops the update), naming
      axis and size.
    - ValueError: by the methods, for a value that cannot be broadcast to the indexed part.

    >>> import numpy as np, gpusim
    >>> x = np.zeros(4)
    >>> gpusim.at(x)[1:3].set(5.0), x
    (array([0., 5., 5., 0.]), array([0., 0., 0., 0.]))
    >>> gpusim.at(x)[[0, 0, 3]].add(1.0)
    array([2., 0., 0., 1.])
    >>> gpusim.vmap(lambda row, i: row.at[i].set(9.0))(np.zeros((2, 3)), np.array([0, 2]))
    array([[9., 0., 0.],
           [0., 0., 9.]])
    """
    return At(x)


class At:
    """An array that waits for an index: see `at`."""

    __slots__ = ("_x",)

    def __init__(self, x: Any) -> None:
        self._x = x

    def __getitem__(self, index: Any) -> Indexed:
        return Indexed(self._x, index)

    def __repr__(self) -> str:
        return f"at({self._x!r})"


class Indexed:
    """A part of an array; its methods return changed copies of the whole array: see `at`.

    Where an index names an element more than once, `set` keeps the last value, and the others take
    all values into account, one after the other in C order.
    """

    __slots__ = ("_index", "_x")

    def __init__(self, x: Any, index: Any) -> None:
        self._x = x
        self._index = index

    def __repr__(self) -> str:
        return f"at({self._x!r})[{self._index!r}]"

    def get(self) -> Any:
        """The part itself, ``x[index]``.

        >>> import numpy as np, gpusim
        >>> gpusim.at(np.arange(4))[::2].get()
        array([0, 2])
        """
        x = self._x
        if not isinstance(x, MappedArray):
            x = x if on_device(x) else np.asanyarray(x)
            if not [*_mapped(self._index)]:
                return x[self._index]
            x = wrap(x, ())
        return x[self._index]

    def set(self, value: Any) -> Any:
        """The copy with ``x[index] = value``.

        >>> import numpy as np, gpusim
        >>> gpusim.at(np.arange(6).reshape(2, 3))[:, -1].set([7, 8])
        array([[0, 1, 7],
               [3, 4, 8]])
        """
        return _changed(self._x, self._index, (value,), assign_at)

    def add(self, value: Any) -> Any:
        """The copy with ``x[index] += value``, in which repeated elements add up, as in np.add.at.

        >>> import numpy as np, gpusim
        >>> gpusim.at(np.zeros(3, int))[[0, 2, 2, 2]].add(1)
        array([1, 0, 3])
        """
        return self._accumulate(np.add, value)

    def subtract(self, value: Any) -> Any:
        """The copy with ``x[index] -= value``, repeated elements as often as they occur.

        >>> import numpy as np, gpusim
        >>> gpusim.at(np.array([5, 5]))[[0, 0]].subtract([1, 2])
        array([2, 5])
        """
        return self._accumulate(np.subtract, value)

    def multiply(self, value: Any) -> Any:
        """The copy with ``x[index] *= value``, repeated elements as often as they occur.

        >>> import numpy as np, gpusim
        >>> gpusim.at(np.array([5, 5]))[[0, 0]].multiply([2, 3])
        array([30,  5])
        """
        return self._accumulate(np.multiply, value)

    def divide(self, value: Any) -> Any:
        """The copy with ``x[index] /= value``; a TypeError for integers, as in NumPy.

        >>> import numpy as np, gpusim
        >>> gpusim.at(np.array([6.0, 5.0]))[0].divide(3)
        array([2., 5.])
        """
        return self._accumulate(np.true_divide, value)

    def power(self, value: Any) -> Any:
        """The copy with ``x[index] **= value``, repeated elements as often as they occur.

        >>> import numpy as np, gpusim
        >>> gpusim.at(np.array([3, 5]))[0].power(2)
        array([9, 5])
        """
        return self._accumulate(np.power, value)

    def min(self, value: Any) -> Any:
        """The copy with the smaller of ``x[index]`` and `value`, as by np.minimum.

        >>> import numpy as np, gpusim
        >>> gpusim.at(np.array([3, 5]))[[0, 0]].min([2, 1])
        array([1, 5])
        """
        return self._accumulate(np.minimum, value)

    def max(self, value: Any) -> Any:
        """The copy with the larger of ``x[index]`` and `value`, as by np.maximum.

        >>> import numpy as np, gpusim
        >>> gpusim.at(np.array([3, 5]))[:].max(4)
        array([4, 5])
        """
        return self._accumulate(np.maximum, value)

    def apply(self, function: Callable[[Any], Any]) -> Any:
        """The copy with ``x[index] = function(x[index])``.

        A ufunc of one argument is applied to a repeated element as often as it occurs (ufunc.at);
        any other function sees the whole part once.

        >>> import numpy as np, gpusim
        >>> gpusim.at(np.array([1.0, 4.0]))[1:].apply(np.sqrt)
        array([1., 2.])
        """
        if isinstance(function, np.ufunc) and (function.nin, function.nout) == (1, 1):
            return _changed(self._x, self._index, (), _accumulating(function))
        return self.set(function(self.get()))

    def _accumulate(self, ufunc: np.ufunc, value: Any) -> Any:
        return _changed(self._x, self._index, (value,), _accumulating(ufunc))


def assign_at(x: Array, index: Any, value: Any) -> None:
    """``x[index] = value``, on a GPU too with the last value of an element named more than once.

    CuPy's assignment keeps any of them. `value` has the dtype and the library of `x`.
    """
    x, value = as_bits(x), as_bits(value)
    if not on_device(x) or not value.ndim or not _may_repeat(as_tuple(index)):
        x[index] = value
        return
    numbers = np.arange(x.size, dtype=np.int64, like=x).reshape(x.shape)[index]
    surplus = max(value.ndim - numbers.ndim, 0)
    value = value.reshape(value.shape[surplus:]) if surplus else value
    values = np.broadcast_to(value, numbers.shape)
    turns = np.arange(numbers.size, dtype=np.int64, like=x).reshape(numbers.shape)
    last = np.zeros(x.size, np.int64, like=x)
    np.maximum.at(last, numbers, turns)
    x[index] = values.reshape(-1)[last[numbers]]  # all that go to one element are the same


def _may_repeat(index: tuple[Any, ...]) -> bool:
    """Whether an index can name an element twice: whether it has arrays that are not masks."""
    arrays = (
        entry for entry in index if isinstance(entry, (list, tuple)) or hasattr(entry, "ndim")
    )
    return any(
        isinstance(entry, (list, tuple)) or (entry.ndim > 0 and entry.dtype != np.bool_)
        for entry in arrays
    )


ROUNDED_ONCE = frozenset(
    {np.add, np.subtract, np.multiply, np.true_divide, np.minimum, np.maximum, np.negative}
)
"""Ufuncs whose results for real numbers do not depend on the layout, as np.power's do."""


def _accumulating(ufunc: np.ufunc) -> Write:
    """ufunc.at, in one call of the ufunc where no element is named twice and bits are the same."""

    def write(x: Array, index: Any, *values: Any) -> None:
        _check_dtype(ufunc, x.dtype)
        entries = as_tuple(index)
        gpu = on_device(x)
        lacking = gpu and lacks_kernels(x.dtype)
        at_once = gpu or (ufunc in ROUNDED_ONCE and x.dtype.kind in "biuf")
        if is_basic(entries) and at_once and not lacking:
            part = x[stack_basic(entries, 0)]
            ufunc(part, *values, out=part)
        else:
            update_at(ufunc, x, index, *values)

    return write


@lru_cache(256)
def _check_dtype(ufunc: np.ufunc, dtype: np.dtype[Any]) -> None:
    """NumPy's TypeError where the ufunc's results do not go into an array of this dtype.

    ufunc.at itself converts them without a word: it divides integers, say.
    """
    one = np.ones(1, dtype)
    with np.errstate(all="ignore"):
        ufunc(*[one] * ufunc.nin, out=one)


_INTEGERS = ("int32", "uint32", "int64", "uint64")
ATOMIC: dict[np.ufunc, tuple[str, ...]] = dict.fromkeys((np.add, np.maximum, np.minimum), _INTEGERS)
"""Updates by a GPU's atomic operations whose order does not matter, and their dtypes."""


def update_at(ufunc: np.ufunc, x: Array, index: Any, *values: Any) -> None:
    """``ufunc.at(x, index, *values)`` for a C-contiguous `x`, with NumPy's bits on a GPU too.

    CuPy's own has few dtypes, and adds floats in any order, which changes no bits of `ATOMIC`. Else
    values that go to one element are taken in their order: by one launch where gpusim has a kernel,
    by a call of the ufunc for all first values, one for all second values and so on otherwise.
    """
    if not on_device(x):
        ufunc.at(x, index, *values)
        return
    from ... import cuda  # loaded when an array is on a GPU

    numbers = np.arange(x.size, dtype=np.int64, like=as_bits(x)).reshape(x.shape)[index]
    places = numbers.reshape(-1)
    flat = x.reshape(-1)
    spread = [
        contiguous(np.broadcast_to(as_bits(value), numbers.shape)).reshape(-1) for value in values
    ]
    if ufunc in ATOMIC and x.dtype.name in ATOMIC[ufunc]:
        ufunc.at(flat, places, *spread)
        return
    if cuda.has_update(ufunc, x.dtype):
        (value,) = spread
        cuda.update_at(ufunc, flat, places, value.view(x.dtype))
        return
    order = np.argsort(places)  # CuPy's sorts are stable
    ascending = places[order]
    turn = np.arange(len(places), like=places) - np.searchsorted(ascending, ascending)
    for number in range(int(turn.max()) + 1 if len(places) else 0):
        chosen = order[turn == number]
        here = places[chosen]
        flat[here] = ufunc(flat[here], *(value[chosen] for value in spread))


def _mapped(tree: Any) -> Iterator[MappedArray]:
    """The MappedArrays in an index or a value."""
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _mapped(item)
    elif isinstance(tree, slice):
        yield from _mapped((tree.start, tree.stop, tree.step))
    elif isinstance(tree, MappedArray):
        yield tree


def _changed(x: Any, index: Any, values: tuple[Any, ...], write: Write) -> Any:
    """The copy of `x` after write(copy, index, *values), on every replica where one is mapped."""
    values = tuple(_one_array(value) for value in values)
    mapped = [*_mapped((x, index, values))]
    if not mapped:
        return _write_copy(x, index, values, write)
    if not fallback_settings().force:
        try:
            return _write_stacked(x, as_tuple(index), values, write, common_axes(mapped))
        except (NoRule, IndexError):
            pass
    return call_per_replica(_write_copy, (x, index, values), {"write": write}, "at[...]")


def _one_array(value: Any) -> Any:
    """`value`, as one MappedArray if it is a sequence with MappedArrays in it."""
    if isinstance(value, (list, tuple)) and [*_mapped(value)]:
        return np.stack([_one_array(item) for item in value])
    return value


def _converted(value: Any, x: Array) -> Any:
    """`value` in the dtype and library of `x`, converted as in assignment: 1.5 becomes the int 1,
    and 300 does not fit uint8."""
    if isinstance(value, MappedArray):
        return value.astype(x.dtype, copy=False)
    if on_device(value):
        return convert(value, x.dtype)
    return to_library_of(x, value, x.dtype)


def _write_copy(x: Any, index: Any, values: tuple[Any, ...], write: Write) -> Any:
    copy = copy_array(x) if on_device(x) else np.copy(x)
    write(copy, index, *(_converted(value, copy) for value in values))
    return copy


def _write_stacked(
    x: Any, index: tuple[Any, ...], values: tuple[Any, ...], write: Write, axes: Axes
) -> MappedArray:
    copy = copy_array(lead_full(x, axes))
    if isinstance(copy, np.generic):  # a sum over all axes, say: NumPy's scalars do not change
        copy = np.asarray(copy)
    place = stack_index(index, copy, axes)
    if write is not assign_at and any(visible_ndim(value) > len(place.shape) for value in values):
        raise NoRule  # of all writers, only assignment drops leading axes of length 1
    new = [fitted(_converted(value, copy), place) for value in values]
    write(copy, place.stacked, *new)
    return wrap(copy, axes)


def fitted(value: Any, place: StackedIndex) -> Array:
    """`value` broadcast to each replica's part at `place`, in the order in which NumPy finds it."""
    ndim = len(place.shape)
    surplus = max(visible_ndim(value) - ndim, 0)
    data = lead(value, place.axes, ndim + surplus)
    kept = (slice(None),) * len(place.axes)
    if data.shape[len(kept) : len(kept) + surplus] != (1,) * surplus:
        raise NoRule
    data = data[kept + (0,) * surplus]
    try:
        data = np.broadcast_to(data, sizes(place.axes) + place.shape)
    except ValueError:
        raise NoRule from None
    return place.disarrange(data)


def install(mapped_array: type[MappedArray]) -> None:
    """Attach the property `at`."""
    doc = "Changed copies: ``x.at[index].set(value)``, also add, multiply, min, max and so on."
    mapped_array.at = property(at, doc=doc)
