"""Batched rules of searching, sorting by several keys, and counting (np.sort is in
reductions.py)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....libraries import constant_like, on_device, to_host, to_library_of, zeros_like
from ...axis_environment import Axes
from ..align import (
    common_axes,
    lead_full,
    shift_axis,
    sizes,
    visible_ndim,
    visible_shape,
)
from ..array import Array, MappedArray, unpack, wrap
from ..dispatch import NoRule, rule
from .arguments import merge_visible, plain, unpack_array


@rule(np.lexsort)
def lexsort(keys: Any, axis: int = -1) -> Any:
    parts = list(keys)
    if (
        not parts
        or len({visible_shape(part) for part in parts}) != 1
        or visible_ndim(parts[0]) == 0
    ):
        raise NoRule
    axes = common_axes(parts)
    place = shift_axis(axis, visible_ndim(parts[0]), len(axes))
    keys = [lead_full(part, axes) for part in parts]
    if not any(map(on_device, keys)):
        return wrap(np.lexsort(keys, place), axes)
    order = np.argsort(keys[0], axis=place)  # CuPy's sorts are stable
    for key in keys[1:]:
        again = np.argsort(np.take_along_axis(key, order, place), axis=place)
        order = np.take_along_axis(order, again, place)
    return wrap(order, axes)


def _precedes(first: Array, second: Array) -> Array:
    """first < second in the order that NumPy sorts in: NaN is last."""
    less = np.less(first, second)
    return less if second.dtype.kind != "f" else less | (np.isnan(second) & ~np.isnan(first))


def _bisect(table: Array, values: Array, side: str) -> Array:
    """The positions of `values` (..., m) in the sorted rows of `table` (..., n), for all rows."""
    low = np.zeros_like(values, dtype=np.intp)
    high = np.full_like(low, table.shape[-1])
    for _ in range(int(table.shape[-1]).bit_length()):
        middle = (low + high) >> 1
        probe = np.take_along_axis(table, np.minimum(middle, table.shape[-1] - 1), -1)
        beyond = _precedes(probe, values) if side == "left" else ~_precedes(values, probe)
        beyond &= low < high
        low = np.where(beyond, middle + 1, low)
        high = np.where(beyond, high, np.minimum(middle, high))
    return low


@rule(np.searchsorted)
def searchsorted(a: Any, v: Any, side: Any = "left", sorter: Any = None) -> Any:
    side = {"l": "left", "r": "right"}.get(str(side)[:1].lower(), "")
    if visible_ndim(a) != 1 or not side:
        raise NoRule
    gpu = next(filter(on_device, (unpack(part)[0] for part in (a, v, sorter))), None)
    if gpu is not None:
        a, sorter = (constant_like(gpu, part) for part in (a, sorter))
        v = v if isinstance(v, MappedArray) else to_library_of(gpu, v)
    table, table_axes = unpack_array(a)
    order, order_axes = (None, ()) if sorter is None else unpack_array(sorter)
    if not table_axes and not order_axes:
        values, axes = unpack_array(v)
        return wrap(np.searchsorted(table, values, side, order), axes)
    axes = common_axes([a, v, sorter])
    values, _ = unpack_array(v)
    dtype = np.result_type(table, values)
    if dtype.kind not in "biuf" or visible_shape(a) == (0,):
        raise NoRule
    rows = lead_full(a, axes)
    if sorter is not None:
        rows = np.take_along_axis(rows, lead_full(sorter, axes), -1)
    wanted = lead_full(v, axes)
    found = _bisect(rows.astype(dtype), merge_visible(wanted, axes).astype(dtype), side)
    return wrap(np.reshape(found, wanted.shape), axes)


@rule(np.digitize)
def digitize(x: Any, bins: Any, right: bool = False) -> Any:
    data, axes = unpack_array(x)
    return wrap(np.digitize(data, to_library_of(data, plain(bins)), plain(right)), axes)


def _counts(places: Array, length: int, axes: Axes, weights: Array | None = None) -> Array:
    """np.bincount of every replica's vector of integers below `length`."""
    replicas = math.prod(sizes(axes))
    rows = (
        np.reshape(places, (replicas, -1))
        if places.size
        else zeros_like(places, (replicas, 0), np.intp)
    )
    offsets = np.arange(replicas, dtype=np.intp, like=places)[:, None] * length
    weighing = None if weights is None else np.reshape(weights, -1)
    counts = np.bincount(np.reshape(rows + offsets, -1), weighing, replicas * length)
    return np.reshape(counts, (*sizes(axes), length))


@rule(np.bincount)
def bincount(x: Any, /, weights: Any = None, minlength: Any = 0) -> Any:
    axes = common_axes([x, weights])
    least = plain(minlength)
    if visible_ndim(x) != 1 or (weights is not None and visible_shape(weights) != visible_shape(x)):
        raise NoRule
    places = lead_full(x, axes)
    weighing = None if weights is None else lead_full(weights, axes)
    if not np.can_cast(places.dtype, np.intp) or (
        weighing is not None and not np.can_cast(weighing.dtype, np.float64)
    ):
        raise NoRule
    length = int(least)
    if places.size:
        if length < 0 or places.min() < 0:
            raise NoRule
        longest = np.max(places, axis=-1) + 1
        length = max(length, int(longest.max()))
        if length > least and longest.min() != longest.max():
            raise NoRule  # as many counts as each replica's largest value: not one shape
    return wrap(_counts(places, length, axes, weighing), axes)


@rule(np.histogram)
def histogram(
    a: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None
) -> Any:
    data, axes = unpack_array(a)
    bins, range = plain(bins), plain(range)
    bins = to_host(bins) if on_device(bins) else bins
    fixed = isinstance(bins, (list, tuple, np.ndarray)) or (
        isinstance(bins, (int, np.integer)) and range is not None
    )
    if not fixed or weights is not None or data.dtype.kind not in "iuf":
        raise NoRule
    edges = np.histogram_bin_edges(np.zeros(1, data.dtype), bins, range)
    edges = to_library_of(data, edges)
    values = merge_visible(data, axes)
    count = len(edges) - 1
    places: Array = np.searchsorted(edges, values, "right") - 1
    places = np.where(values == edges[-1], count - 1, places)
    inside = (values >= edges[0]) & (values <= edges[-1])
    counts = _counts(np.where(inside, places, count), count + 1, axes)[..., :-1]
    if density:
        totals = np.sum(counts, axis=-1, keepdims=True)
        counts = counts / np.diff(edges).astype(float) / totals
    return wrap(counts, axes), wrap(edges, ())
