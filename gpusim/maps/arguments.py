"""Arguments and results of maps: in_axes and out_axes as tree prefixes, axis sizes, stacking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from .. import trees
from ..libraries import (
    as_bits,
    copy_array,
    in_native_order,
    on_device,
    owner,
    refuse_subclasses,
)
from .axis_environment import Axes, AxisEntry
from .mapped_array.array import Array, MappedArray, read_only, unpack, wrap, wrap_array
from .mapped_array.memory import is_writable

PYTHON_SCALARS = (bool, int, float, complex)


class MapArguments(NamedTuple):
    """The flattened arguments of one call, the mapped axis of each leaf, and the axis size."""

    leaves: list[Any]
    structure: trees.Structure | None  # None: each leaf is a positional argument
    axes: list[int | None]
    size: int

    def shared(self) -> Iterator[tuple[int, Any, str]]:
        """The leaves that all replicas share: number, leaf, and why."""
        for number, (leaf, axis) in enumerate(zip(self.leaves, self.axes, strict=True)):
            if axis is None:
                yield number, leaf, "in_axes=None"

    def call(self, function: Callable[..., Any], leaves: list[Any]) -> Any:
        """function(*args, **kwargs) with the arguments' leaves replaced by `leaves`."""
        if self.structure is None:
            return function(*leaves)
        args, kwargs = trees.unflatten(self.structure, leaves)
        return function(*args, **kwargs)


def is_array(value: Any) -> bool:
    """Whether `value` is a NumPy scalar or an array of a library with NumPy's protocols."""
    return (
        isinstance(value, (np.ndarray, np.generic, MappedArray))
        or on_device(value)
        or (hasattr(value, "__array_function__") and hasattr(value, "shape"))
    )


def as_array(value: Any, what: str) -> Array:
    """`value` as an array: np.asarray of numbers and of objects with __array__.

    The result is in the machine's byte order.

    **Raises**, with a message that begins with `what`:

    - TypeError: for other values.
    - ValueError: for masked arrays, as in JAX, and for np.matrix.
    """
    if isinstance(value, np.ndarray):
        if type(value) is not np.ndarray:
            refuse_subclasses(value, what)
        return value if value.dtype.isnative else in_native_order(value)
    if isinstance(value, MappedArray):
        data, axes = unpack(value)
        return value if data.dtype.isnative else wrap(in_native_order(data), axes)
    if on_device(value):
        return value
    if isinstance(value, np.generic) or isinstance(value, PYTHON_SCALARS):
        return np.asarray(value)
    if hasattr(value, "__array_function__") and hasattr(value, "shape"):
        return value
    if hasattr(value, "__array__"):
        return np.asarray(value)
    name = type(value).__name__
    cure = f": register the class by gpusim.tree.register_dataclass({name})"
    raise TypeError(
        f"{what} is {value!r:.60} of type {name}; an array or a number was expected"
        + (cure if is_dataclass(value) else "")
    )


def as_stacked(value: Any, what: str) -> tuple[Array, Axes]:
    """The stacked data of `as_array`, and its mapped axes; () for plain arrays."""
    data, axes = unpack(value)
    if type(data) is np.ndarray and data.dtype.isnative:
        return data, axes
    data, axes = unpack(as_array(value, what))
    return np.asarray(data) if isinstance(data, np.generic) else data, axes


def check_in_axes(what: str, in_axes: Any, named: str = "in_axes") -> Any:
    """in_axes, under the name `named`, with a list of entries converted to a tuple.

    **Raises**:

    - TypeError: if it holds other values than integers and None.
    """
    if in_axes is None or type(in_axes) is int:
        return in_axes
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    leaves = trees.broadcast_prefix(in_axes, in_axes, named)
    kinds = all(leaf is None or type(leaf) is int for leaf in leaves)
    if not kinds or not isinstance(in_axes, (tuple, dict)):
        raise TypeError(
            f"{what} {named} must be an int, None, or a tuple with an entry (an int, None or a "
            f"tree of them) for each positional argument, but got {in_axes!r}"
        )
    return in_axes


def check_axis_size(what: str, axis_size: Any) -> int | None:
    """axis_size as an int or None; an error if it is not a positive integer."""
    if axis_size is None:
        return None
    if isinstance(axis_size, bool) or not isinstance(axis_size, (int, np.integer)):
        raise TypeError(f"{what} axis_size must be an int or None, but got {axis_size!r}")
    if axis_size < 1:
        raise ValueError(f"{what} axis_size must be at least 1, but got {axis_size}")
    return int(axis_size)


def read_arguments(
    what: str,
    in_axes: Any,
    axis_size: int | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    named: str = "in_axes",
) -> MapArguments:
    """Flatten the arguments, and find the mapped axis of each leaf and its size.

    Keyword arguments are mapped along axis 0, as in JAX.

    **Raises**:

    - ValueError: if in_axes does not fit the arguments, an axis is out of range, sizes differ, or
      no leaf is mapped and axis_size is not given; and for masked arrays and np.matrix.
    - TypeError: if a mapped leaf is not an array.
    """
    if isinstance(in_axes, tuple) and len(in_axes) != len(args):
        raise ValueError(
            f"{what} {named} must be an int, None, or a tuple with an entry for each positional "
            f"argument, but got len({named})={len(in_axes)} for {len(args)} arguments"
        )
    structure = None
    if kwargs or not trees.LEAF_TYPES.issuperset(map(type, args)):
        leaves, structure = trees.flatten((args, kwargs))
    else:
        leaves = [*args]
    axes: list[int | None]
    if in_axes is None or type(in_axes) is int:
        axes = [in_axes] * (len(trees.flatten(args)[0]) if kwargs else len(leaves))
    else:
        axes = trees.broadcast_prefix(in_axes, args, f"{what} {named}")
    if kwargs:
        axes += [0] * (len(leaves) - len(axes))
    size, first = axis_size, None  # the size, and the leaf that it is of
    for number, leaf in enumerate(leaves):
        axis = axes[number]
        if type(leaf) is not np.ndarray or not leaf.dtype.isnative:
            if axis is not None or isinstance(leaf, np.ndarray):
                leaves[number] = leaf = as_array(leaf, f"{what}: leaf {number} of the arguments")
        if axis is None:
            continue
        try:
            extent = leaf.shape[axis]
        except IndexError:
            needed = axis + 1 if axis >= 0 else -axis
            shape = tuple(leaf.shape)
            raise ValueError(
                f"{what} was requested to map leaf {number} of the arguments along axis {axis}, "
                f"which implies that its rank should be at least {needed}, but is only "
                f"{len(shape)} (its shape is {shape})"
            ) from None
        if axis < 0:
            axes[number] = axis + len(leaf.shape)
        if size is None:
            size, first = extent, number
        elif extent != size:
            raise ValueError(
                f"{what} got inconsistent sizes for array axes to be mapped: "
                f"{_mapped_axis(first, leaves, axes)} has size {size}, but "
                f"{_mapped_axis(number, leaves, axes)} has size {extent}"
            )
    if size:
        return MapArguments(leaves, structure, axes, size)
    if not leaves:
        raise ValueError(
            f"{what} needs at least one argument that contains an array, or axis_size=; got "
            f"args={args!r:.60} and kwargs={kwargs!r:.60}"
        )
    if size is None:
        raise ValueError(
            f"{what} must have at least one non-None value in {named}, or axis_size must be given"
        )
    raise ValueError(
        f"{what} needs at least one replica, but the mapped axis of "
        f"{_mapped_axis(first, leaves, axes)} has size 0"
    )


def _mapped_axis(number: int | None, leaves: list[Any], axes: list[int | None]) -> str:
    """A leaf's mapped axis in messages; None: the size comes from axis_size."""
    if number is None:
        return "axis_size"
    shape = tuple(leaves[number].shape)
    return f"leaf {number} of the arguments (axis {axes[number]} of shape {shape})"


def enter(leaf: Any, axis: int | None, entry: AxisEntry) -> Any:
    """The argument leaf as the mapped function sees it: its `axis` hidden, as that of `entry`."""
    if axis is None and not is_array(leaf):
        return leaf
    data, axes = (leaf, ()) if type(leaf) is np.ndarray else as_stacked(leaf, "argument")
    if type(data) is not np.ndarray and on_device(data):
        entry.like = data
        entry.read_only |= {id(owner(data))}
    if axis is None:
        return wrap_array(read_only(data), axes)
    if axis:
        # in C order, so that reductions add in the same order however the argument was laid out
        data = copy_array(np.moveaxis(data, len(axes) + axis, len(axes)))
    return wrap_array(read_only(data), (*axes, entry))


def check_out_axes(what: str, out_axes: Any, named: str = "out_axes") -> None:
    """TypeError if out_axes hold other values than integers and None."""
    if out_axes is None or type(out_axes) is int:
        return
    for axis in trees.broadcast_prefix(out_axes, out_axes, named):
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, (int, np.integer))):
            raise TypeError(f"{what} {named} must hold integers and None, but got {axis!r:.60}")


def result_axes(
    what: str, out_axes: Any, results: list[Any], structure: trees.Structure
) -> list[Any]:
    """The entry of out_axes for each leaf of the results."""
    if out_axes is None or type(out_axes) is int:
        return [out_axes] * len(results)
    return trees.broadcast_prefix(out_axes, trees.unflatten(structure, results), f"{what} out_axes")


def leave(leaf: Any, axis: int | None, entry: AxisEntry, outer: bool, what: str) -> Any:
    """The result leaf outside the map: the axis of `entry` is visible again, at position `axis`.

    `outer` says whether another vmap or shard_map encloses this one.

    **Raises**:

    - TypeError: if the leaf is neither array nor number.
    - ValueError: if axis is None but the value differs between replicas, or out of range.
    """
    data, axes = as_stacked(leaf, f"{what}: a result")
    varies = entry in axes
    if varies:
        axes = axes[:-1]  # the map that ends is the innermost
    if axis is None:
        if varies:
            raise ValueError(
                f"{what} out_axes is None for a result of shape {leaf.shape} that is mapped over "
                f"{entry!r}: only what is the same on all replicas (psum's or all_gather's result, "
                "say) can be returned once"
            )
        if not isinstance(leaf, MappedArray):
            data = copy_array(data)  # it may be an array of the caller's
        return wrap_array(data, axes) if outer else data
    count = len(axes)
    place = count + normalize_axis_index(axis, data.ndim - count + (not varies))
    if not varies:
        data = _repeat(data, place, entry.size)
    elif place != count:
        data = np.moveaxis(data, count, place)
    return wrap_array(data, axes) if outer else data


def _repeat(data: Array, place: int, size: int) -> Array:
    """A copy with one more axis of `size` at `place`, along which nothing varies."""
    bits = as_bits(data)
    index = (slice(None),) * place + (np.newaxis,)
    repeated: Array = bits[index].repeat(size, place)
    return repeated if bits is data else repeated.view(data.dtype)


def own_results(results: list[Any], arguments: Sequence[Any]) -> list[Any]:
    """The results, copied where they share memory with an argument or each other, or cannot be
    written: the caller owns them."""
    owners = set()
    for argument in arguments:
        if type(argument) is np.ndarray:
            owners.add(id(argument if argument.base is None else owner(argument)))
        elif isinstance(argument, MappedArray) or on_device(argument):
            owners.add(id(owner(unpack(argument)[0])))
    for number, result in enumerate(results):
        plain = type(result) is np.ndarray
        data = result if plain else unpack(result)[0]
        if not plain and not isinstance(data, np.ndarray) and not on_device(data):
            continue
        key = id(data if data.base is None else owner(data))
        if key in owners or not (data.flags.writeable if plain else is_writable(data)):
            data = copy_array(data)
            mapped = isinstance(result, MappedArray)
            results[number] = wrap_array(data, result._axes) if mapped else data
            key = id(data)
        owners.add(key)
    return results
