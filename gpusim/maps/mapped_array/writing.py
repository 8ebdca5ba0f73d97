"""Writes into MappedArrays: x[index] = value, out=, ufunc.at, and NumPy's functions that write.

A write that stacked data cannot take in one call, and one that NumPy refuses, is made once per
replica, on writable views of the replicas' parts.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from ... import trees
from ...libraries import (
    as_bits,
    constant_like,
    copy_array,
    of_one_library,
    on_device,
    owner,
    to_library_of,
)
from ..axis_environment import Axes, diverging_where, union
from .align import lead, shift_axis, visible_ndim, visible_shape
from .array import (
    Array,
    Flat,
    MappedArray,
    is_scalar,
    make_writable,
    unpack,
    wrap,
)
from .dispatch import FALLBACK_ERRORS, INDIRECT, NoRule, call_function, call_ufunc, writes
from .indices import as_tuple, is_basic, stack_basic, stack_index
from .memory import count_write
from .per_replica import call_per_replica, restore_discarded, values_of
from .settings import fallback_settings
from .updates import assign_at, fitted, update_at

ASSIGNED, OUTPUT = "assignment destination", "output array"


def _change(
    targets: Sequence[MappedArray], axes: Axes, destination: str, write: Callable[..., Any]
) -> Any:
    """Make the targets vary along `axes`, and return write(*targets).

    A picked view is written as a copy, which is then assigned to its place. Where only some
    replicas take the code around it, the others keep their values.
    """
    count_write()
    where = diverging_where()
    axes = union(axes, axes_of(where))
    ready = []
    for target in targets:
        if type(target) in INDIRECT:
            copied = target.copy()
            make_writable(copied, axes, destination)
            ready.append(copied)
        else:
            make_writable(target, axes, destination)
            ready.append(target)
    before = values_of(ready) if where is not None else []
    result = write(*ready)
    if where is not None:
        restore_discarded(ready, before)
    for target, changed in zip(targets, ready, strict=True):
        if target is not changed:
            target._write(changed)  # type: ignore[attr-defined]
    return result


def axes_of(tree: Any) -> Axes:
    """The axes over which a tree of values, slices included, is mapped together."""
    if isinstance(tree, MappedArray):
        return unpack(tree)[1]
    axes: Axes = ()
    if isinstance(tree, slice):
        tree = (tree.start, tree.stop, tree.step)
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, (tuple, list)):
        for part in tree:
            axes = union(axes, axes_of(part))
    return axes


def refuse_plain(name: str, axes: Axes) -> None:
    """TypeError: a plain array cannot take values that differ between replicas."""
    names = ", ".join(repr(entry.name) for entry in axes)
    raise TypeError(
        f"{name} would write values mapped over {names} into a plain array (a left "
        "side or out=), which has room for one replica's only: make the array like a mapped one "
        "(acc = np.zeros(3, like=x)), or take the returned array (acc = acc + x)"
    )


def _plain(value: Any) -> Any:
    return unpack(value)[0] if isinstance(value, MappedArray) else value


# x[index] = value


def set_item(array: MappedArray, index: Any, value: Any) -> None:
    """array[index] = value on every replica."""
    if is_scalar(array):
        raise TypeError(f"'numpy.{array.dtype.name}' object does not support item assignment")
    axes = union(axes_of(index), axes_of(value))
    _change([array], axes, ASSIGNED, lambda target: _set(target, index, value))


def _set(array: MappedArray, index: Any, value: Any) -> None:
    if isinstance(value, (list, tuple)) and axes_of(value):
        value = np.stack([np.asarray(part, like=array) for part in value])
    if not fallback_settings().force:
        try:
            return _set_stacked(array, index, value)
        except FALLBACK_ERRORS:
            pass
    call_per_replica(assign, (array, index, value), {}, "assignment to an index")
    return None


def _set_stacked(array: MappedArray, index: Any, value: Any) -> None:
    data, axes = unpack(array)
    if isinstance(index, str):
        data, entries = data[index], (Ellipsis,)
    else:
        entries = as_tuple(index)
    if is_basic(entries):
        part = data[stack_basic(entries, len(axes))]
        assign(part, ..., _fit(value, part.ndim - len(axes), axes, part))
        return
    if len(entries) == 1 and _is_mask(entries[0], array) and visible_ndim(value) == 0:
        where = lead(entries[0], axes, array.ndim) if axes else _plain(entries[0])
        values = _fit(value, array.ndim, axes, data)
        if not isinstance(values, (np.ndarray, np.generic)) and not on_device(values):
            values = to_library_of(data, values, data.dtype)
        _copy_where(data, values, "unsafe", where)
        return
    place = stack_index(entries, data, axes)
    if place.axes != axes:
        raise NoRule
    if visible_ndim(value) == 0 and not axes_of(value):
        assign(data, place.stacked, _fit(value, 0, axes, data))
        return
    known = isinstance(value, MappedArray) or on_device(value)
    value = value if known else to_library_of(data, value, data.dtype)
    assign(data, place.stacked, fitted(value, place))


def _copy_where(data: Array, values: Any, casting: Any, where: Any) -> None:
    if on_device(data):
        values = as_bits(_converted(to_library_of(data, values), data))
    np.copyto(as_bits(data), values, casting, where)


def _is_mask(entry: Any, array: MappedArray) -> bool:
    known = isinstance(entry, (MappedArray, np.ndarray)) or on_device(entry)
    return known and entry.dtype == np.bool_ and visible_shape(entry) == array.shape


def assign(data: Array, index: Any, value: Any) -> None:
    if on_device(data):
        value = to_library_of(data, value, None if hasattr(value, "dtype") else data.dtype)
        assign_at(data, index, _converted(value, data))
    else:
        data[index] = value


def _converted(value: Any, data: Array) -> Any:
    """`value` in the dtype of data on a GPU, whose library converts fewer dtypes in assignment."""
    if not on_device(data) or not hasattr(value, "dtype"):
        return value
    return unpack(wrap(to_library_of(data, value), ()).astype(data.dtype, copy=False))[0]


def _fit(value: Any, ndim: int, axes: Axes, data: Array) -> Any:
    """`value` to be broadcast to one replica's `ndim` axes, without surplus axes of length 1."""
    if not isinstance(value, MappedArray):
        return constant_like(data, value) if on_device(data) else value
    surplus = value.ndim - ndim
    if surplus > 0:
        if value.shape[:surplus] != (1,) * surplus:
            raise NoRule
        value = np.reshape(value, value.shape[surplus:])
    return lead(value, axes, ndim) if unpack(value)[1] else unpack(value)[0]


def set_flat(flat: Flat, index: Any, value: Any) -> None:
    """array.flat[index] = value on every replica."""
    array = flat.array
    if is_scalar(array):
        raise TypeError("a NumPy scalar cannot be changed in place")

    def set_part(part: Array, index: Any, value: Any) -> None:
        part.flat[index] = value

    axes = union(axes_of(index), axes_of(value))
    _change(
        [array],
        axes,
        ASSIGNED,
        lambda target: call_per_replica(set_part, (target, index, value), {}, "ndarray.flat"),
    )


# out=


def _outputs(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else (out,)


def _check_outputs(name: str, outs: Sequence[Any], axes: Axes) -> list[MappedArray]:
    """The MappedArrays among `outs`; TypeError for values that cannot hold the result."""
    mapped = [out for out in outs if isinstance(out, MappedArray)]
    for out in outs:
        if isinstance(out, MappedArray):
            if is_scalar(out):
                raise TypeError("return arrays must be of ArrayType")
        elif out is not None and (axes or mapped):
            refuse_plain(name, union(axes, axes_of(mapped)))
    return mapped


@writes("ufunc")
def call_ufunc_into(
    function: np.ufunc, method: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """function.method(*inputs, out=..., **kwargs)."""
    options = dict(kwargs)
    outs = _outputs(options.pop("out"))
    name = f"np.{function.__name__}" + ("" if method == "__call__" else f".{method}")
    axes = axes_of((inputs, options))
    mapped = _check_outputs(name, outs, axes)
    called = function if method == "__call__" else getattr(function, method)
    if not mapped:  # nothing varies
        return called(*map(_plain, inputs), **_plain_options(kwargs))
    axes = union(axes, axes_of(mapped))

    def write(*targets: MappedArray) -> Any:
        ready = dict(zip(map(id, mapped), targets, strict=True))
        into = tuple(ready.get(id(out)) for out in outs)
        if method == "__call__" and not fallback_settings().force:
            try:
                return _ufunc_stacked(function, inputs, into, options, axes)
            except ArithmeticError:
                raise  # parts of the array may be written already
            except FALLBACK_ERRORS:
                pass
        out = into if len(into) > 1 or method == "__call__" else into[0]
        return call_per_replica(called, inputs, {**options, "out": out}, name)

    results = _change(mapped, axes, OUTPUT, write)
    if len(outs) == 1:
        return outs[0]
    return tuple(found if out is None else out for out, found in zip(outs, results, strict=True))


def _plain_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in kwargs.items()}


EXACT = frozenset("?bhilqBHILQfdg")
"""Type characters of the dtypes whose loops have the same bits in every layout."""


def _ufunc_stacked(
    function: np.ufunc,
    inputs: tuple[Any, ...],
    outs: tuple[Any, ...],
    options: dict[str, Any],
    axes: Axes,
) -> Any:
    arrays = [value for value in (*inputs, options.get("where")) if isinstance(value, MappedArray)]
    targets = [out for out in outs if out is not None]
    ndim = min(out.ndim for out in targets)
    plain = [value for value in inputs if not isinstance(value, MappedArray)]
    if any(visible_ndim(value) > ndim for value in (*arrays, *plain, options.get("where", True))):
        raise NoRule  # NumPy's error
    if len(targets) > 1 and any(
        owner(unpack(one)[0]) is owner(unpack(other)[0])
        for one, other in itertools.combinations(targets, 2)
    ):
        raise NoRule  # which is written last
    direct = (
        len(outs) == function.nout
        and function.signature is None
        and function.nin == 2
        and function not in (np.fmax, np.fmin)
        and all(out is not None and out.ndim == ndim for out in outs)
        and all(value._data.dtype.char in EXACT for value in (*arrays, *targets))
        and not any(isinstance(value, (np.ndarray, np.generic)) for value in plain)
        and not on_device(unpack(targets[0])[0])
    )
    if direct:
        data = [lead(v, axes, ndim) if isinstance(v, MappedArray) else v for v in inputs]
        if isinstance(options.get("where"), MappedArray):
            options = {**options, "where": lead(options["where"], axes, ndim)}
        into = tuple(unpack(out)[0] for out in outs)
        return function(*data, out=into, **options)
    casting = options.get("casting", "same_kind")
    computing = options
    if on_device(unpack(targets[0])[0]):  # CuPy has no where=; all is computed, and some stored
        computing = {name: value for name, value in options.items() if name != "where"}
    found = call_ufunc(None, function, "__call__", *inputs, **computing)
    results = found if isinstance(found, tuple) else (found,)
    for out, result in zip(outs, results, strict=True):
        if out is None:
            continue
        gufunc = function.signature is not None
        if not np.can_cast(result.dtype, out.dtype, casting) or (
            gufunc and visible_shape(result) != out.shape
        ):
            raise NoRule
    for out, result in zip(outs, results, strict=True):
        if out is not None:
            _store(out, result, axes, casting, options.get("where", True))
    return results


def _store(out: MappedArray, value: Any, axes: Axes, casting: Any, where: Any = True) -> None:
    """Copy `value` into `out`, which all `axes` lead; NoRule where shapes do not fit."""
    ndim, data = out.ndim, unpack(out)[0]
    try:
        fits = np.broadcast_shapes(visible_shape(value), visible_shape(where), out.shape)
    except ValueError:
        raise NoRule from None
    if fits != out.shape:
        raise NoRule
    source = _fit(value, ndim, axes, data)
    mask = _fit(where, ndim, axes, data)
    if mask is not True:
        _copy_where(data, source, casting, mask)
    elif on_device(data):
        assign(data, ..., source)
    else:
        np.copyto(data, source, casting)


STORED = frozenset(
    {
        *(np.sum, np.prod, np.max, np.min, np.any, np.all, np.argmax, np.argmin, np.cumsum),
        *(np.cumprod, np.clip, np.round, np.take, np.concatenate, np.stack, np.dot, np.compress),
        *(np.ptp, np.einsum),
    }
)
"""Functions for which out=, of the result's dtype and shape, is the result stored."""


@writes("function")
def call_function_into(
    called: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], place: int
) -> Any:
    """called(*args, **kwargs), whose argument `out` (the one at `place`) is given."""
    if "out" in kwargs:
        out = kwargs["out"]
        rest, options = args, {name: value for name, value in kwargs.items() if name != "out"}
    else:
        out = args[place]
        rest, options = (*args[:place], None, *args[place + 1 :]), kwargs
    if isinstance(out, tuple) and len(out) == 1:
        (out,) = out
    name = f"np.{called.__name__}"
    axes = axes_of((rest, options))
    mapped = _check_outputs(name, _outputs(out), axes)
    if not mapped or not isinstance(out, MappedArray):
        if mapped:
            raise TypeError(f"{name} takes one array for out=, but got {type(out).__name__}")
        plain_args = trees.map(_plain, args)
        return called(*plain_args, **trees.map(_plain, kwargs))
    axes = union(axes, unpack(out)[1])

    def write(target: MappedArray) -> None:
        if called in STORED and not fallback_settings().force:
            try:
                result = call_function(None, called, (), rest, options)
                if result.dtype == out.dtype and result.shape == out.shape:
                    _store(target, result, axes, "no")
                    return
            except FALLBACK_ERRORS:
                pass
        given = [target if value is out else value for value in args]
        if "out" in kwargs:
            call_per_replica(called, tuple(given), {**kwargs, "out": target}, name)
        else:
            given[place] = target
            call_per_replica(called, tuple(given), kwargs, name)

    _change([out], axes, OUTPUT, write)
    return out


# Functions that write into their first argument.


def writer(
    function: Callable[..., Any],
    stacked: Callable[..., Any] | None = None,
    on_gpu: Callable[..., Any] | None = None,
) -> None:
    """Register how `function`, which writes into its first argument, writes into a MappedArray.

    `stacked` writes into all replicas' parts at once, or raises NoRule. `on_gpu` is called for one
    replica's part in a GPU's memory, where CuPy's function of that name differs from NumPy's.
    """

    def write_part(part: Any, *args: Any, **kwargs: Any) -> Any:
        return (on_gpu if on_gpu and on_device(part) else function)(part, *args, **kwargs)

    @writes(function)
    def write_into(first: Any, *args: Any, **kwargs: Any) -> Any:
        name = f"np.{function.__name__}"
        axes = axes_of((args, kwargs))
        if not isinstance(first, MappedArray):
            if axes:
                refuse_plain(name, axes)
            args, kwargs = trees.map(_plain, args), trees.map(_plain, kwargs)
            if isinstance(first, np.ndarray):
                of_one_library(name, [first, *args, *kwargs.values()])
            return function(first, *args, **kwargs)
        if is_scalar(first):
            call_per_replica(function, (first, *args), kwargs, name)  # NumPy's error, or no effect
            raise TypeError(f"{name} was given a NumPy scalar, which cannot be changed in place")
        axes = union(axes, unpack(first)[1])

        def write(target: MappedArray) -> None:
            if stacked is not None and not fallback_settings().force:
                try:
                    return stacked(target, axes, *args, **kwargs)
                except FALLBACK_ERRORS:
                    pass
            call_per_replica(write_part, (target, *args), kwargs, name)
            return None

        return _change([first], axes, ASSIGNED, write)


def _copyto(dst: Any, axes: Axes, src: Any, casting: Any = "same_kind", where: Any = True) -> None:
    if isinstance(src, (list, tuple)) or on_device(unpack(dst)[0]):
        raise NoRule
    _store(dst, src, axes, casting, where)


def _fill_diagonal(a: Any, axes: Axes, val: Any, wrap: bool = False) -> None:
    if a.ndim != 2 or wrap or visible_ndim(val) != 0 or on_device(unpack(a)[0]):
        raise NoRule
    places = np.arange(min(a.shape))
    data = unpack(a)[0]
    value = _fit(val, 1, axes, data)
    data[..., places, places] = value


def _put_along_axis(arr: Any, axes: Axes, indices: Any, values: Any, axis: Any) -> None:
    if axis is None or visible_ndim(indices) != arr.ndim:
        raise NoRule
    data = unpack(arr)[0]
    if on_device(data) or any(visible_ndim(v) > arr.ndim for v in (indices, values)):
        raise NoRule
    places, new = lead(indices, axes, arr.ndim), lead(values, axes, arr.ndim)
    np.put_along_axis(data, places, new, shift_axis(axis, arr.ndim, len(axes)))


def _putmask(a: Any, axes: Axes, mask: Any, values: Any) -> None:
    if visible_ndim(values) or visible_shape(mask) != a.shape:
        raise NoRule
    _store(a, values, axes, "same_kind", mask)


def _put_on_gpu(a: Array, ind: Any, v: Any, mode: str = "raise") -> None:
    """np.put; of an element named twice the last value stays, while CuPy keeps any."""
    places = to_library_of(a, ind).reshape(-1)
    places = np.clip(places, 0, a.size - 1) if mode == "clip" else places % max(a.size, 1)
    values = to_library_of(a, v).reshape(-1)
    if values.size:
        values = values[np.arange(places.size, like=places) % values.size]
        assign(a, np.unravel_index(places, a.shape), values)


def _put_along_on_gpu(arr: Array, indices: Any, values: Any, axis: int | None = -1) -> None:
    """np.put_along_axis; of an element named twice the last value stays, while CuPy keeps any."""
    if axis is None:
        return _put_on_gpu(arr, indices, values)
    axis = range(arr.ndim)[axis]
    index = [np.arange(size, like=arr) for size in arr.shape]
    each = [
        at.reshape([-1 if i == j else 1 for j in range(arr.ndim)]) for i, at in enumerate(index)
    ]
    each[axis] = to_library_of(arr, indices)
    return assign(arr, tuple(each), values)


writer(np.copyto, _copyto)
writer(np.fill_diagonal, _fill_diagonal)
writer(np.put_along_axis, _put_along_axis, _put_along_on_gpu)
writer(np.putmask, _putmask)
writer(np.put, on_gpu=_put_on_gpu)
writer(np.place)


@writes("at")
def ufunc_at(function: np.ufunc, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """function.at(array, index, *values) on every replica."""
    array, index, *values = inputs
    name = f"np.{function.__name__}.at"
    axes = axes_of((index, values))
    if not isinstance(array, MappedArray):
        if axes:
            refuse_plain(name, axes)
        return function.at(array, trees.map(_plain, index), *map(_plain, values))
    if is_scalar(array):
        raise TypeError(f"{name} was given a NumPy scalar, which cannot be changed in place")
    axes = union(axes, unpack(array)[1])

    def write(target: MappedArray) -> None:
        if not fallback_settings().force:
            try:
                return _at_stacked(function, target, index, values)
            except FALLBACK_ERRORS:
                pass
        call_per_replica(function.at, (target, index, *values), {}, name)
        return None

    return _change([array], axes, ASSIGNED, write)


def _at_stacked(function: np.ufunc, array: MappedArray, index: Any, values: Sequence[Any]) -> None:
    data, axes = unpack(array)
    place = stack_index(as_tuple(index), data, axes)
    if place.axes != axes or any(visible_ndim(value) > len(place.shape) for value in values):
        raise NoRule
    ready = [
        value
        if visible_ndim(value) == 0 and not isinstance(value, MappedArray)
        else fitted(value if isinstance(value, MappedArray) else to_library_of(data, value), place)
        for value in values
    ]
    if on_device(data):
        ready = [_converted(to_library_of(data, value), data) for value in ready]
        if not data.flags.c_contiguous:
            copied = copy_array(data)
            update_at(function, copied, place.stacked, *ready)
            data[...] = copied
            return
    update_at(function, data, place.stacked, *ready)


# Methods and operators.


def _power_into(self: MappedArray, other: Any) -> Any:
    return _operate(self, other, operator.pow, operator.ipow)


def _matmul_into(self: MappedArray, other: Any) -> Any:
    return _operate(self, other, operator.matmul, operator.imatmul)


def _operate(self: MappedArray, other: Any, binary: Any, in_place: Any) -> Any:
    """self **= other, self @= other."""
    if getattr(other, "__array_ufunc__", binary) is None:
        return NotImplemented
    if is_scalar(self):
        return binary(self, other)
    axes = union(axes_of(self), axes_of(other))

    def write(target: MappedArray) -> None:
        if not fallback_settings().force:
            try:
                result = binary(target, other)
                fits = binary is operator.pow or visible_shape(result) == target.shape
                if fits and np.can_cast(result.dtype, target.dtype, "same_kind"):
                    return _store(target, result, axes, "same_kind")
            except FALLBACK_ERRORS:
                pass
        call_per_replica(in_place, (target, other), {}, in_place.__name__)
        return None

    _change([self], axes, OUTPUT, write)
    return self


def _by_method(name: str) -> Callable[..., None]:
    """ndarray's method that orders the elements along an axis in place."""

    def method(self: MappedArray, *args: Any, axis: int = -1, **options: Any) -> None:
        called = getattr(np.ndarray, name)
        before = 0 if name == "sort" else 1  # partition(kth, axis), sort(axis)
        given = list(args)
        if len(given) > before:
            axis = given.pop(before)

        def write(target: MappedArray) -> None:
            data, axes = unpack(target)
            plain = not axes_of((given, options)) and isinstance(axis, int)
            if plain and target.ndim and not fallback_settings().force and not on_device(data):
                place = shift_axis(axis, target.ndim, len(axes))
                called(data, *map(_plain, given), axis=place, **options)
            else:

                def one(part: Array, *given: Any) -> None:
                    getattr(part, name)(*given, axis=axis, **options)

                call_per_replica(one, (target, *given), {}, f"numpy.ndarray.{name}")

        _change([self], axes_of((self, given)), ASSIGNED, write)

    method.__name__ = name
    method.__doc__ = f"Sort in place: ndarray.{name}."
    return method


def fill(self: MappedArray, value: Any) -> None:
    """Set all elements to one value."""
    if visible_ndim(value):
        raise ValueError("the value to fill with must be a scalar")
    self[...] = value


def put(self: MappedArray, indices: Any, values: Any, mode: str = "raise") -> None:
    """np.put of this array."""
    np.put(cast(Any, self), indices, values, cast(Any, mode))


def install(mapped_array: type[MappedArray]) -> None:
    """Attach assignment and the methods that write."""
    mapped_array.__setitem__ = set_item
    mapped_array.__ipow__ = _power_into
    mapped_array.__imatmul__ = _matmul_into
    mapped_array.sort = _by_method("sort")
    mapped_array.partition = _by_method("partition")
    Flat.__setitem__ = set_flat
    mapped_array.fill = fill
    mapped_array.put = put
