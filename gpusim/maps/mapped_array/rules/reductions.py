"""Batched rules of functions along axes: reductions, cumulative functions, sorting, differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ....libraries import constant_like, on_device, to_library_of
from ...axis_environment import Axes
from ..align import (
    common_axes,
    lead,
    lead_full,
    shift_axes,
    shift_axis,
    sizes,
    visible_ndim,
    visible_shape,
)
from ..array import Array, MappedArray, unpack, wrap
from ..dispatch import NoRule, Rule, rule
from .arguments import (
    arrange,
    by_position,
    call,
    copy_broadcast,
    merge_visible,
    name_arguments,
    parameters,
    plain,
    unpack_array,
)
from .products import operand
from .ufuncs import reduction_operands


def available(names: str) -> list[Callable[..., Any]]:
    """Those of NumPy's functions that this version has."""
    return [getattr(np, name) for name in names.split() if hasattr(np, name)]


def visible_operands(array: Any, options: dict[str, Any]) -> tuple[Array, Axes]:
    """As `reduction_operands`, for functions: NumPy's differ in what they make of an axis of a
    0-d array."""
    if visible_ndim(array) == 0 and options.get("axis") not in (None, ()):
        raise NoRule
    return reduction_operands(array, options)


def over_axes(function: Callable[..., Any]) -> Rule:
    """The rule of a reduction whose axis is None (all), an int or a tuple, with where, keepdims
    and so on."""
    first = next(iter(parameters(function)))
    copies = function.__name__.startswith("nan")

    def batched(*args: Any, **kwargs: Any) -> Any:
        options = name_arguments(function, args, kwargs)
        data, axes = visible_operands(options.pop(first), options)
        if copies:
            data = copy_broadcast(data, len(axes))
        if function is np.count_nonzero and not axes:
            raise NoRule  # NumPy before 2.4 gives a Python int for axis=None only
        return wrap(call(function, data, **options), axes)

    return batched


for _function in available(
    "sum prod std var max min amax amin all any ptp count_nonzero "
    "nansum nanprod nanmean nanstd nanvar nanmax nanmin"
):
    rule(_function)(over_axes(_function))


@rule(np.mean)
def mean(*args: Any, **kwargs: Any) -> Any:
    options = name_arguments(np.mean, args, kwargs)
    data, axes = visible_operands(options.pop("a"), options)
    result = np.mean(data, **options)
    scalar = axes and result.ndim == len(axes) and options.get("dtype") is None
    if scalar and data.dtype == np.float16 and not on_device(data):
        # One replica's result is a scalar, which NumPy rounds once from float64, not by way of
        # float32.
        count = np.add.reduce(
            np.broadcast_to(options.get("where", True), data.shape), options["axis"], dtype=np.intp
        )
        options["dtype"] = np.float32
        with np.errstate(divide="ignore", invalid="ignore"):
            result = (np.add.reduce(data, **options) / count).astype(np.float16)
    return wrap(result, axes)


def order_statistic(function: Callable[..., Any]) -> Rule:
    """The rule of median, percentile and their like; the axes of q come first in the result."""

    def batched(*args: Any, **kwargs: Any) -> Any:
        options = name_arguments(function, args, kwargs)
        if on_device(unpack(options["a"])[0]):
            options.pop("overwrite_input", None)
        if options.get("weights") is not None or options.get("overwrite_input"):
            raise NoRule
        data, axes = visible_operands(options.pop("a"), options)
        if function is np.nanmedian and data.dtype.char not in "fdbhilqBHILQ?":
            raise NoRule  # the middle two are averaged in another precision for rows than for one
        mapped, q_ndim = len(axes), np.ndim(options.get("q", 0.0))
        if q_ndim and data.size == 0:
            raise NoRule  # NumPy's nan functions leave out the axes of q
        result = function(data, **options)
        places = range(q_ndim, q_ndim + mapped)
        return wrap(np.moveaxis(result, places, range(mapped)) if q_ndim else result, axes)

    return batched


for _function in available("median nanmedian percentile quantile nanpercentile nanquantile"):
    rule(_function)(order_statistic(_function))


@rule(np.average)
def average(
    a: Any, axis: Any = None, weights: Any = None, returned: bool = False, *, keepdims: Any = False
) -> Any:
    if returned:
        raise NoRule
    if weights is None:
        result = np.mean(a, axis, keepdims=keepdims)
        if result.size == 0:
            raise NoRule  # ZeroDivisionError
        return result
    weights = constant_like(unpack(a)[0], weights)
    kinds = [operand(value).dtype for value in (a, weights)]
    kind = np.result_type(*kinds, *([np.float64] if kinds[0].kind in "biu" else []))
    ndim = visible_ndim(a)
    if visible_shape(weights) != visible_shape(a):
        if visible_ndim(weights) != 1 or axis is None or isinstance(axis, tuple):
            raise NoRule
        place = shift_axis(axis, ndim, 0)
        if visible_shape(weights)[0] != visible_shape(a)[place]:
            raise NoRule
        weights = np.reshape(weights, (1,) * place + (-1,) + (1,) * (ndim - place - 1))
    scale = np.sum(weights, axis, dtype=kind, keepdims=keepdims)
    if np.any(unpack(scale)[0] == 0.0):
        raise NoRule  # ZeroDivisionError
    return np.sum(np.multiply(a, weights, dtype=kind), axis, keepdims=keepdims) / scale


def along_axis(function: Callable[..., Any]) -> Rule:
    """The rule of a function of one array along one axis (None: of the flattened array)."""
    first = next(iter(parameters(function)))
    default = parameters(function)["axis"]

    def batched(*args: Any, **kwargs: Any) -> Any:
        options = {
            key: plain(value)
            for key, value in name_arguments(function, args, kwargs).items()
            if key != first
        }
        array = args[0] if args else kwargs[first]
        data, axes = unpack_array(array)
        ndim, axis = visible_ndim(array), options.get("axis", default)
        if axis is not None:
            if ndim == 0:
                raise NoRule
            options["axis"] = shift_axis(axis, ndim, len(axes))
            first_ones, rest = by_position(function, options)
            return wrap(function(data, *first_ones, **rest), axes)
        keepdims = options.pop("keepdims", False) is True
        first_ones, rest = by_position(function, {**options, "axis": len(axes)})
        result = function(merge_visible(data, axes), *first_ones, **rest)
        return wrap(np.reshape(result, (*sizes(axes), *(1,) * ndim)) if keepdims else result, axes)

    return batched


for _function in available(
    "argmax argmin nanargmax nanargmin cumsum cumprod nancumsum nancumprod unwrap "
    "sort argsort partition argpartition repeat delete"
):
    rule(_function)(along_axis(_function))


def cumulative(function: Callable[..., Any]) -> Rule:
    """The rule of cumulative_sum and cumulative_prod, whose axis may be left out of vectors
    only."""

    def batched(x: Any, /, *, axis: Any = None, **options: Any) -> Any:
        data, axes = unpack(x)
        ndim = visible_ndim(x)
        if ndim == 0 or (axis is None and ndim != 1):
            raise NoRule
        place = shift_axis(-1 if axis is None else plain(axis), ndim, len(axes))
        return wrap(function(data, axis=place, **options), axes)

    return batched


for _function in available("cumulative_sum cumulative_prod"):
    rule(_function)(cumulative(_function))


@rule(np.diff)
def diff(
    a: Any, n: int = 1, axis: int = -1, prepend: Any = np._NoValue, append: Any = np._NoValue
) -> Any:
    ndim = visible_ndim(a)
    if ndim == 0 or n < 0:
        raise NoRule
    place = shift_axis(axis, ndim, 0)
    like = unpack(a)[0]
    prepend, append = (constant_like(like, value) for value in (prepend, append))
    edges = [value for value in (prepend, append) if value is not np._NoValue]
    if edges and n > 0:
        edge = [1 if k == place else extent for k, extent in enumerate(visible_shape(a))]
        before, after = (
            []
            if value is np._NoValue
            else [np.broadcast_to(_array_like(like, value), edge)]
            if visible_ndim(value) == 0
            else [value]
            for value in (prepend, append)
        )
        a = np.concatenate([*before, a, *after], place)
    data, axes = unpack_array(a)
    return wrap(np.diff(data, n, place + len(axes)), axes)


@rule(np.ediff1d)
def ediff1d(ary: Any, to_end: Any = None, to_begin: Any = None) -> Any:
    if to_end is not None or to_begin is not None:
        raise NoRule
    data, axes = unpack_array(ary)
    values = merge_visible(data, axes)
    return wrap(np.subtract(values[..., 1:], values[..., :-1]), axes)


@rule(np.gradient)
def gradient(f: Any, *varargs: Any, axis: Any = None, edge_order: int = 1) -> Any:
    data, axes = unpack(f)
    spacing: Any = [constant_like(data, plain(spacing)) for spacing in varargs]
    places = shift_axes(axis, visible_ndim(f), len(axes))
    if not places:
        raise NoRule
    options: dict[str, Any] = {"axis": places, "edge_order": edge_order}
    result: Any = np.gradient(data, *spacing, **options)
    if isinstance(result, (list, tuple)):
        return type(result)(wrap(part, axes) for part in result)
    return wrap(result, axes)


def _array_like(like: Any, value: Any) -> Any:
    return value if isinstance(value, MappedArray) else to_library_of(like, value)


def trapezoid(y: Any, x: Any = None, dx: Any = 1.0, axis: int = -1) -> Any:
    x = constant_like(unpack(y)[0], x)
    axes = common_axes([y, x])
    ndim, mapped = visible_ndim(y), len(axes)
    if ndim == 0:
        raise NoRule
    place = shift_axis(axis, ndim, mapped)
    if x is None:
        return wrap(np.trapezoid(arrange(lead(y, axes), mapped), dx=plain(dx), axis=place), axes)
    points = lead(x, axes)
    if visible_ndim(x) == 1:
        points = np.reshape(points, points.shape + (1,) * (ndim + mapped - place - 1))
        points = lead(wrap(points, axes), axes, ndim)
    elif visible_ndim(x) != ndim:
        raise NoRule
    return wrap(
        np.trapezoid(arrange(lead_full(y, axes), mapped), arrange(points, mapped), axis=place),
        axes,
    )


for _function in available("trapezoid"):
    rule(_function)(trapezoid)
