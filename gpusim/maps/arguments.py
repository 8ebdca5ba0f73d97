"""What a map does with its arguments and results: in_axes and out_axes as tree prefixes, sizes,
stacking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from .. import trees
from ..libraries import on_device, owner
from .frames import Frame, lockstep_environment
from .mapped_array.array import Array, MappedArray, unpack, wrap

PYTHON_SCALARS = (bool, int, float, complex)


class Arguments(NamedTuple):
    """The flattened arguments of one call: leaves, the mapped axis of each (or None), and the axis
    size."""

    leaves: list[Any]
    structure: trees.Structure
    axes: list[int | None]
    size: int

    def call(self, function: Callable[..., Any], leaves: list[Any]) -> Any:
        """function(*args, **kwargs) with the arguments' leaves replaced by `leaves`."""
        args, kwargs = trees.unflatten(self.structure, leaves)
        return function(*args, **kwargs)


def is_array(value: Any) -> bool:
    """Whether `value` is an array of a library that follows NumPy's protocols (or a NumPy
    scalar)."""
    return isinstance(value, (np.ndarray, np.generic, MappedArray)) or (
        hasattr(value, "__array_function__") and hasattr(value, "shape")
    )


def as_array(value: Any, what: str) -> Array:
    """`value` as an array: arrays as they are, numbers and what has __array__ through np.asarray.

    Raises:
        TypeError: for anything else; the message begins with `what`.
    """
    if isinstance(value, (np.ndarray, MappedArray)):
        return value
    if isinstance(value, np.generic) or isinstance(value, PYTHON_SCALARS):
        return np.asarray(value)
    if hasattr(value, "__array_function__") and hasattr(value, "shape"):
        return value
    if hasattr(value, "__array__"):
        return np.asarray(value)
    raise TypeError(
        f"{what} is {value!r:.60} of type {type(value).__name__}; an array or a number was expected"
    )


def check_in_axes(what: str, in_axes: Any, named: str = "in_axes") -> Any:
    """in_axes, or what the caller calls so, with a list of entries turned into a tuple.

    Raises:
        TypeError: when it holds anything but integers and None.
    """
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    leaves = trees.broadcast_prefix(in_axes, in_axes, named) if in_axes is not None else []
    kinds = all(leaf is None or type(leaf) is int for leaf in leaves)
    if not kinds or not (
        in_axes is None or type(in_axes) is int or isinstance(in_axes, (tuple, dict))
    ):
        raise TypeError(
            f"{what} {named} must be an int, None, or a tuple with an entry (an int, None or a "
            f"tree of "
            f"them) for each positional argument, but got {in_axes!r}"
        )
    return in_axes


def check_axis_size(what: str, axis_size: Any) -> int | None:
    """axis_size as given, when it is None or a positive integer."""
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
) -> Arguments:
    """Flatten the arguments and find which axis of each leaf is mapped, and how long it is.

    Keyword arguments are mapped along axis 0, as in JAX.

    Raises:
        ValueError: when in_axes does not fit the arguments, an axis is out of range, sizes differ,
            or nothing is mapped and axis_size is not given.
        TypeError: when something mapped is no array.
    """
    if isinstance(in_axes, tuple) and len(in_axes) != len(args):
        raise ValueError(
            f"{what} {named} must be an int, None, or a tuple with an entry for each positional "
            f"argument, but got len({named})={len(in_axes)} for {len(args)} arguments"
        )
    leaves, structure = trees.flatten((args, kwargs))
    if not leaves and axis_size is None:
        raise ValueError(
            f"{what} needs at least one argument that contains an array, or axis_size=; got "
            f"args={args!r:.60} and kwargs={kwargs!r:.60}"
        )
    axes = trees.broadcast_prefix(in_axes, args, f"{what} {named}")
    axes += [0] * (len(leaves) - len(axes))
    found: list[int | None] = []
    size, first = axis_size, "axis_size"
    for number, (leaf, axis) in enumerate(zip(leaves, axes, strict=True)):
        name = f"leaf {number} of the arguments"
        if axis is None:
            found.append(None)
            continue
        shape = tuple(as_array(leaf, f"{what}: {name}").shape)
        if not -len(shape) <= axis < len(shape):
            needed = axis + 1 if axis >= 0 else -axis
            raise ValueError(
                f"{what} was requested to map {name} along axis {axis}, which implies that its "
                f"rank "
                f"should be at least {needed}, but is only {len(shape)} (its shape is {shape})"
            )
        axis = normalize_axis_index(axis, len(shape))
        if size is None:
            size, first = shape[axis], f"{name} (axis {axis} of shape {shape})"
        elif shape[axis] != size:
            raise ValueError(
                f"{what} got inconsistent sizes for array axes to be mapped: {first} has size "
                f"{size}, "
                f"but {name} (axis {axis} of shape {shape}) has size {shape[axis]}"
            )
        found.append(axis)
    if size is None:
        raise ValueError(
            f"{what} must have at least one non-None value in {named}, or axis_size must be given"
        )
    if size == 0:
        raise ValueError(
            f"{what} needs at least one replica, but the mapped axis of {first} has size 0"
        )
    return Arguments(leaves, structure, found, size)


def read_only(data: Array) -> Array:
    """A read-only view of a NumPy array; anything else as it is."""
    if isinstance(data, np.ndarray) and data.flags.writeable:
        data = data.view()
        data.flags.writeable = False
    return data


def enter(leaf: Any, axis: int | None, frame: Frame) -> Any:
    """The argument leaf as the mapped function sees it: its `axis` hidden as that of `frame`."""
    if axis is None:
        if is_array(leaf) and not isinstance(leaf, MappedArray):
            if on_device(leaf):
                frame.like = leaf
            return wrap(read_only(np.asarray(leaf) if isinstance(leaf, np.generic) else leaf), ())
        return leaf
    data, axes = unpack(as_array(leaf, "argument"))
    if on_device(data):
        frame.like = data
    if axis:
        # in C order, so that reductions add in the same order however the argument was laid out
        data = np.moveaxis(data, len(axes) + axis, len(axes)).copy(order="C")
    return wrap(read_only(data), (*axes, frame))


def result_data(leaf: Any, what: str) -> tuple[Array, tuple[Frame, ...]]:
    """Stacked data and axes of a result leaf; TypeError if it is neither array nor number."""
    return unpack(as_array(leaf, f"{what}: a result"))


def check_out_axes(what: str, out_axes: Any, named: str = "out_axes") -> None:
    """TypeError for out_axes that hold anything but integers and None."""
    for axis in [] if out_axes is None else trees.broadcast_prefix(out_axes, out_axes, named):
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, (int, np.integer))):
            raise TypeError(f"{what} {named} must hold integers and None, but got {axis!r:.60}")


def leave(leaf: Any, axis: int | None, frame: Frame, what: str) -> Any:
    """The result leaf outside the map: the axis of `frame` visible again, at position `axis`.

    Raises:
        ValueError: when axis is None but the value differs between replicas, or out of range.
    """
    data, axes = result_data(leaf, what)
    if not isinstance(data, np.ndarray) and isinstance(data, np.generic):
        data = np.asarray(data)
    varies = frame in axes
    if varies:
        axes = axes[:-1]  # the map that ends is the innermost
    if axis is None:
        if varies:
            raise ValueError(
                f"{what} out_axes is None for a result of shape {leaf.shape} that is mapped over "
                f"{frame!r}: only what is the same on all replicas (psum's or all_gather's result, "
                "say) can be returned once"
            )
        return _outside(read_only(data), axes, frame)
    outer = len(axes)
    ndim = data.ndim - outer + (not varies)
    place = outer + normalize_axis_index(axis, ndim)
    if varies:
        data = data if place == outer else np.moveaxis(data, outer, place)
    else:
        shape = (*data.shape[:place], frame.size, *data.shape[place:])
        data = np.broadcast_to(np.expand_dims(data, place) if place else data, shape)
    return _outside(data, axes, frame)


def _outside(data: Array, axes: tuple[Frame, ...], ended: Frame) -> Any:
    """`data` as the code around the map that ends sees it: wrapped where another vmap is around."""
    around = any(frame.depth < ended.depth for frame in lockstep_environment())
    return wrap(data, axes) if around else data


def root_of(array: Any) -> Any:
    """The array that owns the memory of `array`."""
    return owner(array)


def part_company(results: Sequence[Any]) -> list[Any]:
    """Make results that share memory with each other read-only, so that writing into one changes no
    other."""
    owners: dict[int, int] = {}
    for result in results:
        if isinstance(result, np.ndarray):
            key = id(root_of(result))
            owners[key] = owners.get(key, 0) + 1
    return [
        read_only(result)
        if isinstance(result, np.ndarray) and owners[id(root_of(result))] > 1
        else result
        for result in results
    ]
