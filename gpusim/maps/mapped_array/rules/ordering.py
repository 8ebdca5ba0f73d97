"""Batched rules of searching, sorting by several keys, and counting (np.sort is in
reductions.py)."""

from __future__ import annotations

import math
import operator
from functools import cache
from typing import Any

import numpy as np

from ....libraries import constant_like, on_device, to_host, to_library_of, zeros_like
from ...axis_environment import Axes
from ..align import (
    common_axes,
    lead,
    lead_full,
    shift_axis,
    sizes,
    visible_ndim,
    visible_shape,
)
from ..array import Array, MappedArray, holds_mapped, unpack, wrap
from ..dispatch import NoRule, rule
from .arguments import merge_visible, plain, unpack_array
from .elementwise import on_elements
from .products import operand


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


_interp_plain = on_elements(np.interp, "x")


@rule(np.interp)
def interp(
    x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None
) -> Any:
    given = [operand(value) for value in (x, xp, fp, left, right) if value is not None]
    if not holds_mapped(given[1:]) and not isinstance(period, MappedArray):
        return _interp_plain(x, xp, fp, left, right, period)
    if any(on_device(unpack(value)[0]) or value.dtype.char not in REAL for value in given):
        raise NoRule
    x, xp, fp = (operand(value).astype(np.float64) for value in (x, xp, fp))
    if visible_ndim(xp) != 1 or visible_shape(xp) != visible_shape(fp) or not visible_shape(xp)[0]:
        raise NoRule
    if period is not None:
        if visible_ndim(period) or not np.all(unpack(period)[0]):
            raise NoRule
        period, left, right = np.abs(period), None, None
        x, xp = x % period, xp % period
        order = np.argsort(xp)
        xp, fp = np.take_along_axis(xp, order, 0), np.take_along_axis(fp, order, 0)
        xp = np.concatenate([xp[-1:] - period, xp, xp[:1] + period])
        fp = np.concatenate([fp[-1:], fp, fp[:1]])
    left, right = fp[0] if left is None else left, fp[-1] if right is None else right
    axes = common_axes([x, xp, fp, left, right])
    rows = [lead_full(value, axes) for value in (xp, fp)]
    if (
        visible_ndim(left)
        or visible_ndim(right)
        or not (rows[0][..., 1:] >= rows[0][..., :-1]).all()
    ):
        raise NoRule
    points = lead_full(x, axes)
    values = merge_visible(points, axes)
    ends = [lead(end, axes, 1) for end in (left, right)]
    if not _rounds_products():
        raise NoRule
    return wrap(np.reshape(_interpolate(values, *rows, *ends), points.shape), axes)


REAL = frozenset("?bhilqBHILQefd")
"""Type characters of the numbers that np.interp converts to float64."""


def _interpolate(values: Array, xp: Array, fp: Array, left: Array, right: Array) -> Array:
    """np.interp for each row, operation by operation."""
    last = xp.shape[-1] - 1
    place = _bisect(xp, values, "right") - 1

    def at(table: Array, here: Array) -> Array:
        return np.take_along_axis(table, here, -1)

    with np.errstate(all="ignore"):
        here = np.clip(place, 0, max(last - 1, 0))
        there = np.minimum(here + 1, last)
        x0, x1, y0, y1 = at(xp, here), at(xp, there), at(fp, here), at(fp, there)
        slope = (y1 - y0) / (x1 - x0)
        found = slope * (values - x0) + y0
        found = np.where(np.isnan(found), slope * (values - x1) + y1, found)
        found = np.where(np.isnan(found) & (y0 == y1), y0, found)
    found = np.where(values == x0, y0, found)
    found = np.where(values >= xp[..., -1:], fp[..., -1:], found)
    found = np.where(values > xp[..., -1:], right, found)
    found = np.where(values < xp[..., :1], left, found)
    if last == 0:
        return np.where(np.isnan(values), fp, found)
    return np.where(np.isnan(values), values, found)


@cache
def _rounds_products() -> bool:
    """Whether np.interp rounds a product before it adds to it; some compilers fuse the two."""
    xp, fp, x = (np.sin(np.arange(1.0, 65) * factor) for factor in (1, 2, 3))
    found = _interpolate(x, np.sort(xp), fp, fp[:1], fp[-1:])
    return bool(np.array_equal(found, np.interp(x, np.sort(xp), fp)))


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


BLOCK = 65536
"""np.histogram adds up weights in blocks of so many elements."""


@rule(np.histogram)
def histogram(
    a: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None
) -> Any:
    if weights is not None and not _added_in_order(a, bins, weights):
        raise NoRule
    edges, low, high = _bin_edges(a, bins, range)
    axes = common_axes([a, edges, low, high, weights])
    data, table = lead_full(a, axes), unpack_array(edges)[0]
    values = merge_visible(data, axes)
    dtype, count = np.result_type(values.dtype, table.dtype), table.shape[-1] - 1
    least, most = (to_library_of(data, lead(end, axes, 1)) for end in (low, high))
    inside = (values >= least) & (values <= most)
    if isinstance(edges, MappedArray) and edges.mapped_axes:
        places = _bisect(lead_full(edges, axes).astype(dtype), values.astype(dtype), "right")
    else:
        table = to_library_of(data, table)
        edges = wrap(table, ())
        places = np.searchsorted(table, values, "right")
    places = np.where(inside, np.clip(places - 1, 0, count - 1), count)
    counts = _counts(
        places, count + 1, axes, None if weights is None else lead_full(weights, axes)
    )[..., :-1]
    if weights is not None:
        counts = counts.astype(unpack_array(weights)[0].dtype)
    result = wrap(counts, axes)
    if density:
        result = result / np.diff(edges).astype(float) / np.sum(result)
    return result, edges


def _added_in_order(a: Any, bins: Any, weights: Any) -> bool:
    """Whether np.histogram adds up the weights of each bin one after the other."""
    data, _ = unpack_array(weights)
    return (
        not on_device(data)
        and data.dtype.kind in "biuf"
        and np.can_cast(data.dtype, np.float64)
        and visible_ndim(bins) == 0
        and visible_shape(weights) == visible_shape(a)
        and math.prod(visible_shape(a)) <= BLOCK
    )


def _bin_edges(a: Any, bins: Any, range: Any) -> tuple[Any, Any, Any]:
    """The edges of np.histogram's bins, and the least and largest value that it counts."""
    dtype = unpack_array(a)[0].dtype
    if dtype.kind not in "iuf" or isinstance(bins, str):
        raise NoRule
    if visible_ndim(bins) == 1:
        edges = operand(bins)
        table = unpack_array(edges)[0]
        if table.shape[-1] < 2 or not (table[..., :-1] <= table[..., 1:]).all():
            raise NoRule
        return edges, edges[..., 0], edges[..., -1]
    count = operator.index(plain(bins))
    if range is None:
        empty = math.prod(visible_shape(a)) == 0
        low, high = (0, 1) if empty else (np.min(a), np.max(a))
    else:
        low, high = range
    ends = [to_host(unpack(end)[0]) for end in (low, high)]
    if not (count > 0 and np.isfinite(ends).all() and np.all(ends[0] <= ends[1])):
        raise NoRule
    same = np.equal(low, high)
    first: Any = np.where(same, low - 0.5, low)
    last: Any = np.where(same, high + 0.5, high)
    if not holds_mapped([low, high]):
        first, last = (low - 0.5, high + 0.5) if same else (low, high)
    kind = np.result_type(*(getattr(value, "dtype", value) for value in (first, last, a)))
    kind = np.result_type(kind, float) if np.issubdtype(kind, np.integer) else kind
    edges = np.linspace(first, last, count + 1, dtype=kind)
    table = unpack(edges)[0]
    if not (table[..., :-1] < table[..., 1:]).all():
        raise NoRule  # too many bins
    exact = dtype.kind in "iu" and all(end.dtype.kind in "iu" for end in ends)
    return (edges, low, high) if exact else (edges, first, last)
