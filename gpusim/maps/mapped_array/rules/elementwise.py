"""Batched rules of elementwise functions and comparisons that are not ufuncs."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import numpy as np

from ....collectives.kernels import convert
from ....libraries import constant_like, on_device, to_library_of
from ..align import common_axes, elementwise, visible_ndim, visible_shape
from ..array import MappedArray, unpack, wrap
from ..dispatch import NoRule, Rule, rule
from ..layout import is_interleaved
from .arguments import call, name_arguments, plain


def on_elements(function: Callable[..., Any], operands: str, transcendental: bool = False) -> Rule:
    """The rule of a function that broadcasts `operands`; other parameters are equal everywhere.

    `transcendental` ones may take another loop of NumPy's for one replica than for all.
    """
    names = operands.split()

    def batched(*args: Any, **kwargs: Any) -> Any:
        options = name_arguments(function, args, kwargs)
        given = [name for name in names if _is_given(options.get(name))]
        data, axes = elementwise([options.pop(name) for name in given])
        if transcendental and any(_loops_differ(part, len(axes)) for part in data):
            raise NoRule
        rest = {name: constant_like(data[0], plain(value)) for name, value in options.items()}
        first = [name for name, own in zip(names, given, strict=False) if name == own]
        by_name = dict(zip(given[len(first) :], data[len(first) :], strict=True))
        return wrap(call(function, *data[: len(first)], **by_name, **rest), axes)

    return batched


def _is_given(value: Any) -> bool:
    return value is not None and value is not np._NoValue


def _loops_differ(part: Any, mapped: int) -> bool:
    """Whether one replica's float16 or complex elements take another of NumPy's loops."""
    return (
        mapped > 0
        and isinstance(part, np.ndarray)
        and part.ndim >= mapped
        and part.dtype.char in "eFD"
        and is_interleaved(part, mapped)
    )


_clip = on_elements(np.clip, "a a_min a_max min max")


@rule(np.clip)
def clip(
    a: Any, a_min: Any = np._NoValue, a_max: Any = np._NoValue, *args: Any, **kwargs: Any
) -> Any:
    if not on_device(unpack(a)[0]) or args:
        return _clip(a, a_min, a_max, *args, **kwargs)
    bounds = [kwargs.pop("min", a_min), kwargs.pop("max", a_max)]  # the names in CuPy are the old
    low, high = (bound if _is_given(bound) else None for bound in bounds)
    given = [bound for bound in (low, high) if bound is not None]
    (data, *given), axes = elementwise([a, *given])
    bounds = [None if bound is None else given.pop(0) for bound in (low, high)]
    both = low is not None and high is not None
    if data.dtype.kind in "iu" or (both and data.dtype.kind in "bV"):
        return wrap(np.clip(data, *bounds, **plain(kwargs)), axes)
    # CuPy clips no complex numbers, makes up a missing bound for integers and floats alone, and
    # ignores a bound that is NaN.
    for extreme, bound in zip((np.maximum, np.minimum), bounds, strict=True):
        data = data if bound is None else extreme(data, bound, **plain(kwargs))
    return wrap(data, axes)


for _function, _operands in (
    (np.round, "a"),
    (np.around, "a"),
    (np.fix, "x"),
    (np.imag, "val"),
    (np.isclose, "a b rtol atol"),
    (np.isreal, "x"),
    (np.iscomplex, "x"),
    (np.isneginf, "x"),
    (np.isposinf, "x"),
    (np.isin, "element"),
):
    rule(_function)(on_elements(_function, _operands))
for _smooth, _operands in ((np.sinc, "x"), (np.i0, "x"), (np.angle, "z")):
    rule(_smooth)(on_elements(_smooth, _operands, transcendental=True))


_real = on_elements(np.real, "val")


@rule(np.real)
def real(val: Any) -> Any:
    return _real(val) if val.dtype.kind == "c" else val


LARGEST = 2.0**63
"""Floats below this one are int64 numbers once they are rounded."""


@rule(builtins.round)
def round_scalar(number: Any, ndigits: Any = None) -> Any:
    """Python's round, which scalars have: an integer if `ndigits` is left out."""
    data, axes = unpack(number)
    if data.ndim != len(axes) or not axes or data.dtype.char not in "efd":
        raise NoRule
    if ndigits is not None:
        return np.round(number, ndigits)
    rounded = np.rint(data)
    if not (np.abs(rounded) < LARGEST).all():
        raise NoRule  # ints that fit no dtype, or NumPy's error for infinities and NaNs
    return wrap(rounded.astype(np.int64), axes)


_replace_nan = on_elements(np.nan_to_num, "x")


@rule(np.nan_to_num)
def nan_to_num(x: Any, copy: bool = True, *args: Any, **kwargs: Any) -> Any:
    if not copy:
        raise NoRule  # would change x
    return _replace_nan(x, True, *args, **kwargs)


@rule(np.where)
def where(condition: Any, /, *choices: Any) -> Any:
    if len(choices) != 2:
        raise NoRule  # np.nonzero in another guise
    data, axes = elementwise([condition, *choices])
    return wrap(_choose(*data), axes)


def _choose(chosen: Any, first: Any, second: Any) -> Any:
    """np.where, also for bfloat16 and 8-bit formats on a GPU: CuPy's makes the first float32."""
    given = [first, second]
    held = [part.dtype for part in given if on_device(part) and part.dtype.isbuiltin == 2]
    if not held:
        return np.where(chosen, first, second)
    dtype = np.result_type(*(part.dtype if on_device(part) else part for part in given))
    gpu = next(filter(on_device, given))
    given = [
        convert(part, dtype) if on_device(part) else to_library_of(gpu, part, dtype)
        for part in given
    ]
    if dtype.isbuiltin != 2:
        return np.where(chosen, *given)
    return np.where(chosen, *(part.view(f"u{dtype.itemsize}") for part in given)).view(dtype)


@rule(np.select)
def select(condlist: Any, choicelist: Any, default: Any = 0) -> Any:
    conditions, choices = list(condlist), list(choicelist)
    data, axes = elementwise([*conditions, *choices, default])
    count = len(conditions)
    if count == 0 or len(choices) != count:
        raise NoRule
    if any(map(on_device, data)):  # CuPy's takes a scalar for the default
        result = data[-1]
        for chosen, value in zip(data[count - 1 :: -1], data[-2 : count - 1 : -1], strict=True):
            result = _choose(chosen, value, result)
        return wrap(result, axes)
    return wrap(np.select(data[:count], data[count:-1], data[-1]), axes)


def astype(x: Any, dtype: Any, /, *, copy: Any = True, device: Any = None) -> Any:
    if not isinstance(x, MappedArray) or device not in (None, "cpu"):
        raise NoRule
    return x.astype(dtype, copy=copy)


if hasattr(np, "astype"):  # NumPy 2.1
    rule(np.astype)(astype)


# Comparisons of whole arrays.


def _dtype(value: Any) -> np.dtype[Any]:
    known = isinstance(value, MappedArray) or on_device(value)
    return value.dtype if known else np.asanyarray(value).dtype


def _verdict(result: Any) -> Any:
    """The result, a Python bool where NumPy's is the same for all replicas."""
    return result if result.mapped_axes else bool(result)


def _differ(*arrays: Any) -> Any:
    return wrap(np.False_, ()) if common_axes(arrays) else False


@rule(np.allclose)
def allclose(a: Any, b: Any, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: bool = False) -> Any:
    return _verdict(np.all(np.isclose(a, b, rtol, atol, equal_nan)))


@rule(np.array_equal)
def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> Any:
    if visible_shape(a1) != visible_shape(a2):
        return _differ(a1, a2)
    same = np.equal(a1, a2)
    if equal_nan and any(_dtype(value).kind not in "biu" for value in (a1, a2)):
        same = same | (np.isnan(a1) & np.isnan(a2))
    return _verdict(np.all(same))


@rule(np.array_equiv)
def array_equiv(a1: Any, a2: Any) -> Any:
    try:
        np.broadcast_shapes(visible_shape(a1), visible_shape(a2))
    except ValueError:
        return _differ(a1, a2)
    return _verdict(np.all(np.equal(a1, a2)))


# Functions of dtypes.


def _by_dtype(value: Any) -> Any:
    return (
        np.empty((0,) * max(visible_ndim(value), 1), value.dtype)
        if isinstance(value, MappedArray) or on_device(value)
        else value
    )


@rule(np.result_type)
def result_type(*arrays_and_dtypes: Any) -> Any:
    return np.result_type(*map(_by_dtype, arrays_and_dtypes))


@rule(np.can_cast)
def can_cast(from_: Any, to: Any, casting: Any = "safe") -> Any:
    return np.can_cast(_by_dtype(from_), to, casting)


@rule(np.common_type)
def common_type(*arrays: Any) -> Any:
    return np.common_type(*map(_by_dtype, arrays))


@rule(np.iscomplexobj)
def iscomplexobj(x: Any) -> Any:
    return np.iscomplexobj(_by_dtype(x))


@rule(np.isrealobj)
def isrealobj(x: Any) -> Any:
    return np.isrealobj(_by_dtype(x))
