"""Arguments of NumPy functions for rules: by name, and replicated values as plain values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ....libraries import on_device
from ...axis_environment import Axes
from ..align import sizes
from ..array import Array, MappedArray, unpack
from ..dispatch import NoRule
from ..layout import NoLayout, copy_replica_major


@cache
def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of the function's parameters, by name, in order."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
    }


def name_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments that were given, by name."""
    return {**dict(zip(parameters(function), args, strict=False)), **kwargs}


def by_position(
    function: Callable[..., Any], options: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """`options` without those of the function's first parameter, the first of them by position.

    Libraries agree on the order of parameters more than on their names.
    """
    positional: list[Any] = []
    rest = dict(options)
    for name in list(parameters(function))[1:]:
        if name not in rest:
            break
        positional.append(rest.pop(name))
    return positional, rest


def unpack_array(value: Any) -> tuple[Array, Axes]:
    """The stacked data of `value`, converted to an array if it is not one, and its mapped axes."""
    data, axes = unpack(value)
    known = isinstance(value, MappedArray) or on_device(data)
    return (data if known else np.asanyarray(data)), axes


def plain(value: Any) -> Any:
    """`value`, which must be the same on all replicas, as NumPy takes it."""
    if isinstance(value, MappedArray):
        data, axes = unpack(value)
        if axes:
            raise NoRule
        return data
    if isinstance(value, (list, tuple)):
        return type(value)(plain(part) for part in value)
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return value


def arrange(data: Array, mapped: int, axis_count: int = 1) -> Array:
    """`data` in a layout whose reductions have each replica's bits."""
    try:
        return copy_replica_major(data, mapped, axis_count)
    except NoLayout:
        raise NoRule from None


def copy_broadcast(data: Array, mapped: int) -> Array:
    """`data` without strides of 0 along mapped axes, which a copy would turn into small strides."""
    if on_device(data) or not any(
        data.strides[place] == 0 and data.shape[place] > 1 for place in range(mapped)
    ):
        return data
    if not data[(0,) * mapped].flags.c_contiguous:
        raise NoRule
    return np.ascontiguousarray(data)


def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """function(*args, **options); of bfloat16 on a GPU in NumPy's dtype, which CuPy makes wider."""
    result = function(*args, **options)
    if function not in WIDENED or options.get("dtype") is not None or not on_device(result):
        return result
    dtype = args[0].dtype
    return result.astype(dtype, copy=False) if dtype.name == "bfloat16" else result


WIDENED = {np.round, np.around, np.var, np.std, np.nanvar, np.nanstd}
"""Functions that return bfloat16 for it in NumPy, and float32 or float64 in CuPy."""


def merge_visible(data: Array, axes: Axes) -> Array:
    """The visible axes merged into one, in C order."""
    length = 1
    for extent in data.shape[len(axes) :]:
        length *= extent
    return np.reshape(data, (*sizes(axes), length))
