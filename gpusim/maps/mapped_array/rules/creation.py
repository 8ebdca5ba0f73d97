"""Batched rules of functions that create arrays, which are replicated unless the fill is mapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ....libraries import copy_array, empty_like, on_device
from ..align import lead, library_here, sizes
from ..array import MappedArray, is_scalar, read_only, unpack, wrap, wrap_array
from ..dispatch import NoRule, Rule, rule
from .arguments import plain, unpack_array


def _prototype(value: Any) -> Any:
    """The first replica's part, whose shape, dtype and layout are those of all."""
    data, axes = unpack(value)
    return data[(0,) * len(axes)] if axes else data


def like(function: Callable[..., Any]) -> Rule:
    """The rule of zeros_like, ones_like and empty_like."""

    def batched(*args: Any, **kwargs: Any) -> Any:
        first, *rest = args or [kwargs.pop(next(iter(kwargs)))]
        return wrap_array(function(_prototype(first), *plain(rest), **plain(kwargs)), ())

    return batched


for _function in (np.zeros_like, np.ones_like, np.empty_like):
    rule(_function)(like(_function))


@rule(np.full_like)
def full_like(a: Any, fill_value: Any, *args: Any, **kwargs: Any) -> Any:
    axes = unpack_array(fill_value)[1]
    if not axes:
        return wrap(
            np.full_like(_prototype(a), unpack(fill_value)[0], *plain(args), **plain(kwargs)), ()
        )
    room = np.empty_like(_prototype(a), *plain(args), **plain(kwargs))
    fill = lead(fill_value, axes, room.ndim)
    result = empty_like(fill, (*sizes(axes), *room.shape), room.dtype)
    np.copyto(result, fill, casting="unsafe")
    return wrap(result, axes)


def converts(function: Callable[..., Any]) -> Rule:
    """The rule of array and asarray, called with like=: nested lists of MappedArrays are
    stacked."""

    def batched(a: Any, dtype: Any = None, **options: Any) -> Any:
        if options.get("ndmin", 0):
            raise NoRule
        values = _stack_lists(a)
        like = values if on_device(values) else library_here()
        if like is not None and not isinstance(values, MappedArray):
            return wrap_array(function(values, dtype, **options, like=like), ())
        if not isinstance(values, MappedArray):
            array = function(values, dtype, **options)
            shared = np.may_share_memory(array, values)
            return wrap_array(read_only(array) if shared else array, ())
        copy = options.get("copy", True if function is np.array else None)
        return _converted(values, dtype, copy, function is np.ascontiguousarray)

    return batched


def _converted(values: MappedArray, dtype: Any, copy: Any, in_order: bool) -> Any:
    """An array, itself where it need not be copied."""
    data, axes = unpack(values)
    if in_order and not data[(0,) * len(axes)].flags.c_contiguous:
        copy = True
    if copy is False and dtype is not None and np.dtype(dtype) != data.dtype:
        raise NoRule  # NumPy's error
    found = values if dtype is None else values.astype(dtype, copy=False)
    data = unpack(found)[0]
    if copy or (is_scalar(values) and found is values):
        data = copy_array(data)
    elif found is values:
        return values
    if in_order and found.ndim == 0:
        return wrap(data[..., None], axes)
    return wrap_array(data, axes)


def _stack_lists(values: Any) -> Any:
    if not isinstance(values, (list, tuple)) or not _holds_mapped(values):
        return values
    return np.stack([_stack_lists(part) for part in values])


def _holds_mapped(values: Any) -> bool:
    if isinstance(values, (list, tuple)):
        return any(_holds_mapped(part) for part in values)
    return isinstance(values, MappedArray)


for _converter in (np.array, np.asarray, np.asanyarray, np.ascontiguousarray):
    rule(_converter)(converts(_converter))
