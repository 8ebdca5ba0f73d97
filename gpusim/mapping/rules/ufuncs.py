"""Batched rules of ufuncs, generalised ufuncs (matmul) and their methods."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np

from ..align import common_axes, elementwise, lead, shift_axes, shift_axis, visible_ndim, visible_shape
from ..array import MappedArray, unpack, wrap
from ..dispatch import NoRule, ufunc_method
from ..frames import Axes, check_active


def wrap_all(results: Any, axes: Axes) -> Any:
    """Wrap an array, or each of a tuple of arrays."""
    if isinstance(results, tuple):
        return tuple(wrap(result, axes) for result in results)
    return wrap(results, axes)


def _same_layout(inputs: tuple[Any, ...]) -> tuple[list[Any], Axes] | None:
    """The operands of the common case: arrays over the same axes with as many dimensions, and numbers."""
    axes: Axes | None = None
    ndim = -1
    data = []
    for value in inputs:
        kind = type(value)
        if kind is MappedArray:
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


@ufunc_method("__call__")
def call(ufunc: np.ufunc, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if ufunc.signature is not None:
        return _generalised(ufunc, inputs, kwargs)
    simple = None if kwargs else _same_layout(inputs)
    if simple is not None:
        data, axes = simple
        where = True
    else:
        where = kwargs.pop("where", True)
        (*data, where), axes = elementwise([*inputs, where])
    if where is not True:
        kwargs = {**kwargs, "where": where}
    try:
        results = ufunc(*data, **kwargs)
    except ValueError:
        np.broadcast_shapes(*(visible_shape(value) for value in inputs))  # raises in the user's shapes
        raise
    return wrap_all(results, axes)


@lru_cache(maxsize=None)
def _core_ndims(signature: str) -> tuple[int, ...]:
    """How many core dimensions each input of a generalised ufunc has."""
    inputs = signature.split("->")[0]
    return tuple(
        len([name for name in group.split(",") if name.strip()])
        for group in re.findall(r"\(([^)]*)\)", inputs)
    )


def _generalised(ufunc: np.ufunc, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "axes" in kwargs or "axis" in kwargs or "keepdims" in kwargs:
        raise NoRule
    if ufunc is np.matmul:
        return matmul(*inputs, **kwargs)
    axes = common_axes(inputs)
    cores = _core_ndims(ufunc.signature or "")
    ndims = [visible_ndim(value) for value in inputs]
    if any(ndim < core for ndim, core in zip(ndims, cores, strict=True)):
        raise NoRule  # NumPy's own error, from the per-replica route
    loop = max(ndim - core for ndim, core in zip(ndims, cores, strict=True))
    data = [lead(value, axes, loop + core) for value, core in zip(inputs, cores, strict=True)]
    return wrap_all(ufunc(*data, **kwargs), axes)


def matmul(first: Any, second: Any, **kwargs: Any) -> Any:
    """np.matmul: vectors are given the axis that NumPy gives them, and lose it again."""
    axes = common_axes((first, second))
    ndims = visible_ndim(first), visible_ndim(second)
    if 0 in ndims:
        raise NoRule
    a, b = (unpack(value)[0] for value in (first, second))
    a, b = (wrap(data, unpack(value)[1]) for data, value in ((np.asanyarray(a), first), (np.asanyarray(b), second)))
    row, column = ndims[0] == 1, ndims[1] == 1
    loop = max(ndims[0] - 2, ndims[1] - 2, 0)
    left = lead(a, axes, 1 if row else loop + 2)
    right = lead(b, axes, 1 if column else loop + 2)
    if row:
        left = left.reshape(left.shape[:-1] + (1,) * (loop + 1) + left.shape[-1:])
    if column:
        right = right.reshape(right.shape[:-1] + (1,) * loop + right.shape[-1:] + (1,))
    if left.shape[-1] != right.shape[-2]:
        raise NoRule  # NumPy's own error, in one replica's shapes
    result = np.matmul(left, right, **kwargs)
    if column:
        result = result[..., 0]
    if row:
        result = result[..., 0] if column else result[..., 0, :]
    return wrap(result, axes)


@ufunc_method("reduce")
def reduce(ufunc: np.ufunc, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    array, *rest = inputs
    options = {**dict(zip(("axis", "dtype"), rest, strict=False)), **kwargs}
    if len(rest) > 2 or not _plain(options.values()):
        raise NoRule
    data, axes = unpack(array)
    ndim = visible_ndim(array)
    options["axis"] = shift_axes(options.get("axis", 0), ndim, len(axes))
    return wrap(ufunc.reduce(data, **options), axes)


@ufunc_method("accumulate")
def accumulate(ufunc: np.ufunc, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    array, *rest = inputs
    options = {**dict(zip(("axis", "dtype"), rest, strict=False)), **kwargs}
    data, axes = unpack(array)
    options["axis"] = shift_axis(options.get("axis", 0), visible_ndim(array), len(axes))
    return wrap(ufunc.accumulate(data, **options), axes)


@ufunc_method("reduceat")
def reduceat(ufunc: np.ufunc, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    array, indices, *rest = inputs
    options = {**dict(zip(("axis", "dtype"), rest, strict=False)), **kwargs}
    places, varying = unpack(indices)
    if varying:
        raise NoRule
    data, axes = unpack(array)
    options["axis"] = shift_axis(options.get("axis", 0), visible_ndim(array), len(axes))
    return wrap(ufunc.reduceat(data, places, **options), axes)


@ufunc_method("outer")
def outer(ufunc: np.ufunc, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first, second = inputs
    axes = common_axes(inputs)
    ndims = visible_ndim(first), visible_ndim(second)
    left = lead(first, axes)
    left = left.reshape(left.shape + (1,) * ndims[1])
    right = lead(second, axes, ndims[0] + ndims[1])
    return wrap_all(ufunc(left, right, **kwargs), axes)


def _plain(values: Any) -> bool:
    return not any(isinstance(value, MappedArray) for value in values)
