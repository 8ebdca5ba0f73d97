"""Batched rules of functions that create arrays, which are replicated unless the fill is mapped."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from ....libraries import copy_array, empty_like, on_device
from ..align import common_axes, lead, library_here, shift_axis, sizes, visible_ndim
from ..array import (
    Array,
    MappedArray,
    holds_mapped,
    is_scalar,
    read_only,
    unpack,
    wrap,
    wrap_array,
)
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
    return _filled(np.empty_like(_prototype(a), *plain(args), **plain(kwargs)), fill_value)


@rule(np.full)
def full(shape: Any, fill_value: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(fill_value, MappedArray):
        raise NoRule
    dtype = fill_value.dtype if dtype is None else dtype
    return _filled(np.empty(plain(shape), dtype, *plain(args), **plain(kwargs)), fill_value)


def _filled(room: Array, fill_value: Any) -> MappedArray:
    """An array with one replica's shape and dtype as `room`, filled with a mapped value."""
    axes = unpack_array(fill_value)[1]
    fill = lead(fill_value, axes, room.ndim)
    result = empty_like(fill, (*sizes(axes), *room.shape), room.dtype)
    np.copyto(result, fill, casting="unsafe")
    return wrap(result, axes)


@rule(np.linspace)
def linspace(
    start: Any,
    stop: Any,
    num: Any = 50,
    endpoint: Any = True,
    retstep: Any = False,
    dtype: Any = None,
    axis: Any = 0,
    **device: Any,
) -> Any:
    """np.linspace, which takes another formula for all ends if the step between two is zero."""
    ends = (start, stop)
    zeros = [
        value.dtype.type(0) if isinstance(value, (MappedArray, np.generic)) else value
        for value in ends
    ]
    kind = np.linspace(*zeros, 0).dtype
    axes, ndim = common_axes(ends), max(map(visible_ndim, ends))
    length, mapped = operator.index(plain(num)), len(axes)
    intervals = length - 1 if endpoint else length
    if kind.kind != "f" or intervals <= 0 or any(on_device(unpack(value)[0]) for value in ends):
        raise NoRule
    first, last = (lead(value, axes, ndim).astype(kind) for value in ends)
    delta = last - first
    step = delta / intervals
    flat = np.any(step == 0, axis=tuple(range(mapped, step.ndim)), keepdims=True)
    counts = np.arange(0, length, dtype=kind).reshape(-1, *(1,) * ndim)
    first, delta, step, flat = (np.expand_dims(part, mapped) for part in (first, delta, step, flat))
    values = np.where(flat, counts / intervals * delta, counts * step) + first
    if endpoint:
        values[(slice(None),) * mapped + (-1,)] = last
    values = np.moveaxis(values, mapped, shift_axis(plain(axis), ndim + 1, mapped))
    if dtype is not None and np.issubdtype(dtype, np.integer):
        np.floor(values, out=values)
    result = wrap(values.astype(dtype or kind, copy=False), axes)
    return (result, wrap(np.squeeze(step, mapped), axes)) if retstep else result


@rule(np.logspace)
def logspace(
    start: Any,
    stop: Any,
    num: Any = 50,
    endpoint: Any = True,
    base: Any = 10.0,
    dtype: Any = None,
    axis: Any = 0,
) -> Any:
    if visible_ndim(base):
        raise NoRule
    powers = np.power(base, np.linspace(start, stop, num, endpoint, axis=axis))
    return powers if dtype is None else powers.astype(dtype, copy=False)


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
    if not isinstance(values, (list, tuple)) or not holds_mapped(values):
        return values
    return np.stack([_stack_lists(part) for part in values])


for _converter in (np.array, np.asarray, np.asanyarray, np.ascontiguousarray):
    rule(_converter)(converts(_converter))
