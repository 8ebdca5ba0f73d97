"""Operands and results of collectives: R values, one per replica.

They are stacked in one array or separate in a list; collectives treat both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_index
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..errors import ReplicaIndexError
from ..groups import Groups
from ..libraries import call_on_bits, in_native_order, on_device, refuse_subclasses

#: An array of any supported library; NumPy's stand for all of them.
Array: TypeAlias = NDArray[Any]

#: A stacked array (R, *batch, *s), or a list of R arrays (*batch, *s).
Values: TypeAlias = Array | Sequence[ArrayLike]

#: How callers name groups: None is one group of all replicas.
GroupsLike: TypeAlias = Groups | Sequence[Sequence[int]] | None


class Result(NamedTuple):
    """The result of a collective.

    A mapped ``value`` differs between replicas: (R, *batch, *s'), or a list of R arrays for a list.
    One that is not mapped is the same on every replica and stored once: (*batch, *s').
    """

    value: Any
    mapped: bool


class Operand:
    """R values of one shape and dtype, with the checks that every collective needs.

    A stacked array of stride 0 along the replicas, or a list that holds one object R times, is
    a value that does not differ between replicas: `same`. (So is an empty array, whose strides
    NumPy makes 0.)
    """

    __slots__ = (
        "batch_ndim",
        "batch_shape",
        "collective",
        "dtype",
        "listed",
        "same",
        "shape",
        "size",
        "values",
        "varies",
    )

    def __init__(self, values: Any, batch_ndim: int, collective: str) -> None:
        self.collective = collective
        self.varies = True  # between instances, if there are several
        self.values = values
        self.listed = isinstance(values, list)
        if self.listed:
            first = values[0]
            self.same = len(set(map(id, values))) == 1
            self.size, shape, self.dtype = len(values), first.shape, first.dtype
        else:
            self.same = values.strides[0] == 0
            self.size, shape, self.dtype = len(values), values.shape[1:], values.dtype
        self.batch_ndim = batch_ndim
        self.batch_shape, self.shape = shape[:batch_ndim], shape[batch_ndim:]

    @classmethod
    def of(cls, values: Values, batch_ndim: int, collective: str) -> Operand:
        """Check the caller's values. ValueError for other values than R of one shape and dtype."""
        if isinstance(values, (list, tuple)):
            checked: Any = _each(values, collective)
        else:
            checked = as_array(values)  # type: ignore[arg-type]  # not a list, as checked
            if not checked.ndim or not len(checked):
                raise ValueError(
                    f"{collective} needs a stacked array (replicas, ...) with at least one "
                    f"replica, got shape {checked.shape}"
                )
        operand = cls(checked, as_index(batch_ndim), collective)
        shape = operand.batch_shape + operand.shape
        if not 0 <= operand.batch_ndim <= len(shape):
            raise ValueError(
                f"{collective}: batch_ndim must be 0 to {len(shape)} for values of shape "
                f"{shape}, got {batch_ndim}"
            )
        return operand

    @property
    def ndim(self) -> int:
        """The number of axes of one replica's value, batch axes not counted."""
        return len(self.shape)

    def __getitem__(self, replica: int) -> Array:
        """One replica's array (*batch, *s), as it is."""
        # With the ellipsis a scalar is an array too, and thereby a view.
        array: Array = self.values[replica] if self.listed else self.values[replica, ...]
        return array

    @property
    def array(self) -> Array:
        """Any of the arrays: what tells the library, and what new arrays are made like."""
        array: Array = self.values[0] if self.listed else self.values
        return array

    def members(self, replicas: Sequence[int]) -> Any:
        """The values of a group: a view where the replicas lie evenly, otherwise a list."""
        if not self.listed and (rows := as_slice(replicas)) is not None:
            return self.values[rows]
        return [self[replica] for replica in replicas]

    def stacked(self) -> Array:
        """The values as (R, *batch, *s): copied only out of a list of different arrays."""
        if not self.listed:
            array: Array = self.values
            return array
        if self.same:
            return np.broadcast_to(self[0], (self.size, *self[0].shape))
        stacked: Array = call_on_bits(np.stack, self.values)
        return stacked

    def view(self, dtype: DTypeLike) -> Operand:
        """The same bits in another dtype of the same width."""
        if not self.listed:
            return Operand(self.values.view(dtype), self.batch_ndim, self.collective)
        viewed = {id(value): value.view(dtype) for value in self.values}
        values = [viewed[id(value)] for value in self.values]
        return Operand(values, self.batch_ndim, self.collective)

    def astype(self, dtype: np.dtype[Any]) -> Operand:
        """The same values in another dtype; one value for all remains one."""
        values: Any
        if self.listed:
            converted = {id(value): value.astype(dtype) for value in self.values}
            values = [converted[id(value)] for value in self.values]
        elif self.same:
            values = np.broadcast_to(self[0].astype(dtype), self.values.shape)
        else:
            values = self.values.astype(dtype)
        return Operand(values, self.batch_ndim, self.collective)

    def axis(self, axis: int, name: str, ndim: int | None = None) -> int:
        """An axis argument as a non-negative axis of the value (or of ``ndim`` axes)."""
        return normalize_axis(axis, self.ndim if ndim is None else ndim, name)

    def mapped(self, stacked: Array) -> Result:
        """A mapped result in the operand's own form: for a list, the views of a stacked one."""
        return Result(unstack(stacked) if self.listed else stacked, True)


def _each(values: Sequence[ArrayLike], collective: str) -> list[Array]:
    if not values:
        raise ValueError(f"{collective} needs at least one replica, got an empty list")
    first = as_array(values[0])
    each = [first]
    for replica, value in enumerate(values[1:], start=1):
        array = first if value is values[0] else as_array(value)
        if array.shape != first.shape or array.dtype != first.dtype:
            raise ValueError(
                f"{collective} needs equal shapes and dtypes on all replicas, got "
                f"{first.dtype}{list(first.shape)} on replica 0 and "
                f"{array.dtype}{list(array.shape)} on replica {replica}"
            )
        each.append(array)
    return each


def as_groups(
    groups: GroupsLike, size: int, collective: str, *, uneven: bool = False
) -> Groups | None:
    """A ``groups`` argument, checked against the number of replicas."""
    if groups is None:
        return None
    if not isinstance(groups, Groups):
        return Groups.from_axis_index_groups(groups, size, uneven=uneven)
    if groups.size != size:
        raise ValueError(f"{collective}: groups partition {groups.size} replicas, got {size}")
    if not (uneven or groups.even):
        raise ValueError(
            f"{collective} needs groups of one size, got sizes {list(groups.group_sizes)}"
        )
    return groups


def unstack(stacked: Array) -> list[Array]:
    """Each replica's part as a view; scalars are arrays too."""
    return [stacked[replica, ...] for replica in range(len(stacked))]


def as_array(value: ArrayLike) -> Array:
    """The value as an array of its own library: CuPy's stay, all else becomes NumPy's.

    It is in the machine's byte order. ValueError for masked arrays and np.matrix.
    """
    if type(value) is np.ndarray or on_device(value):
        array: Any = value
    else:
        refuse_subclasses(value, "an operand")
        array = np.asarray(value)
    return array if array.dtype.isnative else in_native_order(array)


def read_only(array: Array) -> Array:
    """A view that cannot be written through (CuPy's arrays have no such flag)."""
    view = array.view()
    if isinstance(view, np.ndarray):
        view.flags.writeable = False
    return view


def read_only_alias(array: Array, operand: Operand) -> Array:
    """The array, read-only where it shares memory with the stacked operand."""
    return read_only(array) if np.may_share_memory(array, operand.values) else array


def normalize_axis(axis: int, ndim: int, name: str) -> int:
    """A possibly negative axis of ``ndim`` axes; AxisError outside, TypeError for no integer."""
    try:
        axis = as_index(axis)
    except TypeError as error:
        raise TypeError(f"{name} must be an integer, got {axis!r}") from error
    if not -ndim <= axis < ndim:
        raise np.exceptions.AxisError(axis, ndim, name)
    return axis % ndim


def replica_index(index: int, size: int, name: str, *, negative: bool = False) -> int:
    """A replica number of an axis of ``size``; where allowed, negative ones count from its end."""
    try:
        number = as_index(index)
    except TypeError as error:
        raise TypeError(f"{name} must be a replica number (an integer), got {index!r}") from error
    if not (-size if negative else 0) <= number < size:
        raise ReplicaIndexError(
            f"{name} must be a replica number from 0 to {size - 1}, got {number}"
        )
    return number % size


def as_slice(replicas: Sequence[int]) -> slice | None:
    """The slice that selects exactly these rows, in their order; None where none does."""
    first, last, count = replicas[0], replicas[-1], len(replicas)
    step = replicas[1] - first if count > 1 else 1
    if step == 0 or list(replicas) != list(range(first, first + step * count, step)):
        return None
    stop = last + (1 if step > 0 else -1)
    return slice(first, stop if stop >= 0 else None, step)
