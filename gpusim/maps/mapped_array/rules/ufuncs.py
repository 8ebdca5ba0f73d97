"""Batched rules of ufuncs, generalised ufuncs (matmul) and their methods."""

from __future__ import annotations

import math
import operator
import re
from functools import cache
from typing import Any

import numpy as np

from ....libraries import on_device, to_library_of
from ...axis_environment import Axes, check_active
from ..align import (
    common_axes,
    elementwise,
    lead,
    lead_full,
    shift_axes,
    shift_axis,
    visible_ndim,
)
from ..array import Array, MappedArray, is_scalar, unpack, wrap
from ..dispatch import NoRule, rule, ufunc_method
from ..layout import copy_with_gaps, is_interleaved
from ..memory import follow, moves
from .arguments import arrange, plain, unpack_array


def wrap_all(results: Any, axes: Axes) -> Any:
    """Wrap an array, or each of a tuple of arrays."""
    if isinstance(results, tuple):
        return tuple(wrap(result, axes) for result in results)
    return wrap(results, axes)


def _same_layout(inputs: tuple[Any, ...]) -> tuple[list[Any], Axes] | None:
    """The operands of the common case: arrays over the same axes with as many dimensions, and
    numbers."""
    axes: Axes | None = None
    ndim = -1
    data = []
    for value in inputs:
        kind = type(value)
        if kind is MappedArray:
            if moves:
                follow(value)
            if axes is None:
                axes, ndim = value._axes, value._data.ndim
            elif value._axes != axes or value._data.ndim != ndim:
                return None
            data.append(value._data)
        elif kind is float or kind is int:
            data.append(value)
        else:
            return None
    if axes is None:
        return None
    check_active(axes)
    return data, axes


LOOPS_DIFFER = {
    *(u for u in vars(np).values() if isinstance(u, np.ufunc) and u.nin == 1),
    *(np.power, np.float_power, np.arctan2, np.hypot, np.logaddexp, np.logaddexp2),
}
"""Functions for which NumPy may use another loop on contiguous data."""


def _as_one_replica_loops(ufunc: np.ufunc, data: list[Any], mapped: int) -> list[Any]:
    """The operands, spread out where those of one replica take another loop, with other bits.

    That is so for float16 functions (vectorised ones differ in the last place now and then), and
    for complex squares, where one element alone is not squared as a row of them is.
    """
    arrays = [part for part in data if isinstance(part, np.ndarray)]
    ndim = max((part.ndim for part in arrays), default=0)
    stacks = [part for part in arrays if part.ndim == ndim]
    rows = [part for part in stacks if part.size != math.prod(part.shape[:mapped])]
    alone = not rows and all(part.size == 1 or part.ndim == ndim for part in arrays)
    if ufunc is np.square and alone and stacks and stacks[0].dtype.kind == "c":
        raise NoRule
    if all(part.dtype.char != "e" for part in arrays):
        return data
    if any(is_interleaved(part, mapped) for part in (stacks if alone else rows)):
        return [
            copy_with_gaps(part) if isinstance(part, np.ndarray) and part.ndim == ndim else part
            for part in data
        ]
    return data


@ufunc_method("__call__")
def call(ufunc: np.ufunc, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if ufunc.signature is not None:
        return _generalised(ufunc, inputs, kwargs)
    simple = None if kwargs else _same_layout(inputs)
    if simple is not None:
        data, axes = simple
    elif "where" in kwargs:
        (*data, where), axes = elementwise([*inputs, kwargs["where"]])
        kwargs = {**kwargs, "where": where}
    else:
        data, axes = elementwise(inputs)
    if axes and ufunc in LOOPS_DIFFER:
        data = _as_one_replica_loops(ufunc, data, len(axes))
    if ufunc is np.power and axes and all(visible_ndim(value) == 0 for value in inputs):
        return wrap(_power_of_elements(*data, **kwargs), axes)
    if ufunc in (np.fmax, np.fmin) and _zeros_of_both_signs_meet(*data):
        raise NoRule  # which of them is returned depends on the place in the array
    return wrap_all(ufunc(*data, **kwargs), axes)


def _power_of_elements(base: Any, exponent: Any, **kwargs: Any) -> Any:
    """np.power of one element a replica: NumPy squares and so on where the exponent's stride is 0,
    as that of one element is."""
    if on_device(base) or on_device(exponent):
        return np.power(base, exponent, **kwargs)
    base, exponent = (
        np.ascontiguousarray(part) if isinstance(part, np.ndarray) else part
        for part in (base, exponent)
    )  # reversed ones take another loop
    powers = np.power(base, exponent, **kwargs)
    if powers.dtype.char not in "fd" or not np.ndim(exponent):
        return powers
    if kwargs or any(np.ndim(part) and part.dtype != powers.dtype for part in (base, exponent)):
        raise NoRule  # converted operands have other strides
    for simple in (-1, 0, 0.5, 1, 2):
        chosen = exponent == simple
        if chosen.any():
            powers = np.where(chosen, np.power(base, exponent.dtype.type(simple)), powers)
    return powers


def _zeros_of_both_signs_meet(first: Any, second: Any) -> bool:
    if on_device(first) or on_device(second) or np.result_type(first, second).kind != "f":
        return False
    return bool(np.any(np.equal(first, second) & (np.signbit(first) != np.signbit(second))))


@rule(operator.pow)
def power(base: Any, exponent: Any) -> Any:
    """The operator **: for arrays and simple exponents it is np.square, np.sqrt and so on.

    For NumPy's scalars it is the C library's pow.
    """
    if on_device(unpack(base)[0]) or on_device(unpack(exponent)[0]):
        square = type(exponent) is int and exponent == 2
        return np.square(base) if square else np.power(base, exponent)
    if all(is_scalar(value) or np.isscalar(value) for value in (base, exponent)):
        return _power_of_scalars(base, exponent)
    if not isinstance(exponent, (int, float)) or not isinstance(base, MappedArray):
        weak = EXPONENTS_ARE_WEAK and visible_ndim(exponent) == 0
        if weak and not np.isscalar(base) and base.dtype != getattr(exponent, "dtype", None):
            raise NoRule
        return np.power(base, exponent)
    if base.size == 1 and base.dtype.kind == "c":
        raise NoRule
    if exponent in (-1, 0, 0.5, 1, 2):
        data, axes = unpack(base)
        return wrap(data**exponent, axes)
    return np.power(base, exponent)


EXPONENTS_ARE_WEAK = (np.ones(1, np.float16) ** np.array(2, np.int32)).dtype == np.float16
"""Whether NumPy squares where the exponent is a 0-d array of 2, whatever its dtype, as 2.0 does."""

LARGEST_EXACT = 2**53
"""Integers up to this one are float64 numbers."""


def _power_of_scalars(base: Any, exponent: Any) -> Any:
    """base ** exponent of NumPy's scalars, with the bits of the C library's pow.

    np.power of float32 and float64 may be another, vectorized one (Intel's SVML), and it squares;
    np.float_power calls pow for each element. Nothing does so for float32's powf.
    """
    data, axes = elementwise([base, exponent])
    dtype = next(value for value in (base, exponent) if isinstance(value, MappedArray)).dtype
    kinds = {int, float, bool, complex} if dtype.kind == "c" else {int, float, bool}
    kinds = {int} if dtype.kind in "iu" else kinds
    for value, part in zip((base, exponent), data, strict=True):
        scalar = isinstance(value, (MappedArray, np.generic))
        if not (part.dtype == dtype if scalar else type(value) in kinds):
            raise NoRule  # the types are promoted first, in several ways
        if type(value) is int and dtype.kind in "fc" and abs(value) > LARGEST_EXACT:
            raise NoRule
    if dtype.char == "d":
        return wrap(np.float_power(*data), axes)
    if dtype.char not in "eFD" and dtype.kind not in "iu":
        raise NoRule
    operands = [part if isinstance(part, np.ndarray) else dtype.type(part) for part in data]
    return wrap(np.power(*operands), axes)


@cache
def _core_ndims(signature: str) -> tuple[int, ...]:
    """The number of core dimensions of each input of a generalised ufunc."""
    inputs = signature.split("->")[0]
    return tuple(
        len([name for name in group.split(",") if name.strip()])
        for group in re.findall(r"\(([^)]*)\)", inputs)
    )


def _generalised(ufunc: np.ufunc, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "axes" in kwargs:
        raise NoRule
    axes = common_axes(inputs)
    cores = _core_ndims(ufunc.signature or "")
    ndims = [visible_ndim(value) for value in inputs]
    if kwargs.get("axis", -1) >= 0:
        if len(set(ndims)) != 1:
            raise NoRule
        kwargs = {**kwargs, "axis": kwargs["axis"] - ndims[0]}
    if ufunc is np.matmul:
        return matmul(*inputs, **kwargs)
    if any(ndim < core for ndim, core in zip(ndims, cores, strict=True)):
        raise NoRule  # NumPy's own error, from the per-replica fallback
    loop = max(ndim - core for ndim, core in zip(ndims, cores, strict=True))
    data = [lead(value, axes, loop + core) for value, core in zip(inputs, cores, strict=True)]
    return wrap_all(ufunc(*data, **kwargs), axes)


def matmul(first: Any, second: Any, **kwargs: Any) -> Any:
    """np.matmul: vectors are given the axis that NumPy gives them, and lose it again."""
    axes = common_axes((first, second))
    ndims = visible_ndim(first), visible_ndim(second)
    row, column = ndims[0] == 1, ndims[1] == 1
    if 0 in ndims:
        raise NoRule
    loop = max(*ndims, 2) - 2
    left = lead(first, axes, 1 if row else loop + 2)
    right = lead(second, axes, 1 if column else loop + 2)
    if row:
        left = left.reshape(left.shape[:-1] + (1,) * (loop + 1) + left.shape[-1:])
    if column:
        right = right.reshape(right.shape[:-1] + (1,) * loop + right.shape[-1:] + (1,))
    result = np.matmul(left, right, **kwargs)
    if column:
        result = result[..., 0]
    if row:
        result = result[..., 0] if column else result[..., 0, :]
    return wrap(result, axes)


VARYING = ("where", "mean")
"""Options of reductions that are arrays shaped like the first argument."""


def reduction_operands(
    array: Any, options: dict[str, Any], default: Any = None
) -> tuple[Array, Axes]:
    """Stacked data of `array`, with `options` made fit for it: axis shifted, masks stacked, the
    rest plain."""
    masks = {key: options.pop(key) for key in VARYING if isinstance(options.get(key), MappedArray)}
    for key, value in options.items():
        options[key] = plain(value)
    axes = common_axes([array, *masks.values()])
    mapped, ndim, axis = len(axes), visible_ndim(array), options.get("axis", default)
    places = options["axis"] = shift_axes(axis, ndim, mapped)
    for key, value in masks.items():
        if visible_ndim(value) > ndim:
            raise NoRule
        options[key] = arrange(lead_full(value, axes, ndim), mapped, len(places))
    data = lead_full(array, axes) if masks else lead(array, axes)
    return arrange(data, mapped, len(places)), axes


def _options(names: str, given: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options of a ufunc's method, by name."""
    return {**dict(zip(names.split(), given, strict=False)), **kwargs}


@ufunc_method("reduce")
def reduce(ufunc: np.ufunc, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    array, *rest = inputs
    options = _options("axis dtype out keepdims initial where", rest, kwargs)
    if visible_ndim(array) == 0 and options.get("axis", 0) in (0, -1):
        options["axis"] = ()
    data, axes = reduction_operands(array, options, default=0)
    if on_device(data) and ufunc in AS_FUNCTIONS:
        return wrap(AS_FUNCTIONS[ufunc](data, **options), axes)
    return wrap(ufunc.reduce(data, **options), axes)


AS_FUNCTIONS: dict[np.ufunc, Any] = {
    np.maximum: np.max,
    np.minimum: np.min,
    np.logical_and: np.all,
    np.logical_or: np.any,
}
"""Of ufuncs that CuPy reduces by a function only, that function."""


@ufunc_method("accumulate")
def accumulate(ufunc: np.ufunc, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    array, *rest = inputs
    options = _options("axis dtype", rest, kwargs)
    data, axes = unpack_array(array)
    if visible_ndim(array) == 0:
        raise NoRule
    options["axis"] = shift_axis(plain(options.get("axis", 0)), visible_ndim(array), len(axes))
    return wrap(ufunc.accumulate(data, **options), axes)


@ufunc_method("reduceat")
def reduceat(ufunc: np.ufunc, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    array, indices, *rest = inputs
    options = _options("axis dtype", rest, kwargs)
    data, axes = unpack_array(array)
    if visible_ndim(array) == 0:
        raise NoRule
    options["axis"] = shift_axis(plain(options.get("axis", 0)), visible_ndim(array), len(axes))
    return wrap(ufunc.reduceat(data, to_library_of(data, plain(indices)), **options), axes)


@ufunc_method("outer")
def outer(ufunc: np.ufunc, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gpu = next(filter(on_device, (unpack(value)[0] for value in inputs)), None)
    if gpu is not None:
        inputs = tuple(
            value if isinstance(value, MappedArray) else to_library_of(gpu, value)
            for value in inputs
        )
    first, second = inputs
    if "where" in kwargs or ufunc.signature is not None:
        raise NoRule
    axes = common_axes(inputs)
    ndims = visible_ndim(first), visible_ndim(second)
    left = lead(first, axes)
    left = left.reshape(left.shape + (1,) * ndims[1])
    return call(ufunc, (wrap(left, axes), wrap(lead(second, axes), axes)), kwargs)
