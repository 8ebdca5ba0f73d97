"""Dispatch of NumPy's protocols: a batched rule if there is one, else the per-replica fallback."""

from __future__ import annotations

import dis
import inspect
import operator
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ... import trees
from ...libraries import lacks_kernels, of_one_library, on_device
from .align import library_here
from .array import MappedArray, binary_operator, is_scalar, unpack, wrap_array
from .per_replica import call_per_replica, name_of
from .settings import fallback_settings

Rule = Callable[..., Any]

RULES: dict[Callable[..., Any], Rule] = {}
"""Batched rule of each NumPy function, which takes the function's own arguments."""

UFUNC_METHODS: dict[str, Callable[[np.ufunc, tuple[Any, ...], dict[str, Any]], Any]] = {}
"""Batched rule of each ufunc method (__call__, reduce, ...); it takes ufunc, inputs, keywords."""

WRITERS: dict[Any, Rule] = {}
"""How NumPy functions that write into an argument do it; "ufunc" and "function" with out=, "at"."""


INDIRECT: set[type] = set()
"""The classes of MappedArrays that are views at mapped indices."""


WITHOUT_VALUES = {
    np.shape,
    np.ndim,
    np.size,
    np.result_type,
    np.can_cast,
    np.common_type,
    np.iscomplexobj,
    np.isrealobj,
}
"""NumPy functions of shapes and dtypes only, whose results are the same on every replica."""


CREATE: set[Callable[..., Any]] = {
    *(np.arange, np.empty, np.eye, np.full, np.identity, np.ones, np.tri, np.zeros),
    *(np.array, np.asanyarray, np.asarray, np.ascontiguousarray),
}
"""NumPy functions that create arrays; a MappedArray among their arguments is like=."""


MOVES: set[Callable[..., Any]] = {
    *(operator.getitem, np.copy, np.take, np.take_along_axis, np.compress, np.repeat, np.tile),
    *(np.reshape, np.ravel, np.roll, np.delete, np.empty_like, np.zeros_like),
    *(np.concatenate, np.stack, np.vstack, np.hstack, np.dstack, np.column_stack),
}
"""NumPy functions that move the elements of the first argument and compute nothing."""


class NoRule(Exception):
    """Raised by a batched rule for arguments that it does not support: the function is then called
    per replica."""


FALLBACK_ERRORS = (NoRule, ValueError, TypeError, IndexError, ArithmeticError, NotImplementedError)
"""Exceptions of a batched rule after which the function is called per replica, which raises NumPy's
own error, with the shapes of one replica."""


def rule(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Register the decorated function as the batched rule of `functions`."""

    def register(batched: Rule) -> Rule:
        for function in functions:
            RULES[function] = batched
        return batched

    return register


def ufunc_method(name: str) -> Callable[[Rule], Rule]:
    """Register the decorated function as the batched rule of a ufunc method."""

    def register(batched: Rule) -> Rule:
        UFUNC_METHODS[name] = batched
        return batched

    return register


def writes(key: Any) -> Callable[[Rule], Rule]:
    """Register the decorated function in `WRITERS`."""

    def register(writer: Rule) -> Rule:
        WRITERS[key] = writer
        return writer

    return register


ARRAYS_0D = frozenset(
    {
        *(np.where, np.select, np.copy, np.tensordot, np.broadcast_to, np.array, np.asarray),
        *(np.asanyarray, np.zeros_like, np.ones_like, np.empty_like, np.full_like, np.isclose),
        *(np.choose, np.full, np.roll, np.i0, np.isin),
    }
)
"""NumPy functions that return 0-d arrays, where others return scalars."""

METHODS_0D = frozenset(
    {
        *(np.reshape, np.squeeze, np.transpose, np.swapaxes, np.real, np.imag, np.moveaxis),
        np.rollaxis,
    }
)
"""NumPy functions that return 0-d arrays for arrays, and scalars for scalars."""


def _as_numpy_returns(called: Callable[..., Any], args: tuple[Any, ...], result: Any) -> Any:
    """A result without visible axes as the scalar or the 0-d array that NumPy returns."""
    if type(result) is MappedArray and result.ndim == 0:
        data, axes = unpack(result)
        if called in ARRAYS_0D or not (args and is_scalar(args[0])):
            return wrap_array(data, axes)
    return result


def call_ufunc(
    array: MappedArray | None, function: np.ufunc, method: str, *inputs: Any, **kwargs: Any
) -> Any:
    """__array_ufunc__: function.method(*inputs, **kwargs), batched."""
    if "out" in kwargs and any(_is_array(array) for array in _as_tuple(kwargs["out"])):
        return WRITERS["ufunc"](function, method, inputs, kwargs)
    kwargs.pop("out", None)
    if method == "at":
        return WRITERS["at"](function, inputs, kwargs)
    if function is np.power and isinstance(inputs[0], np.generic) and _is_operator():
        return power(*inputs)
    if not fallback_settings().force:
        try:
            return UFUNC_METHODS[method](function, inputs, kwargs)
        except FALLBACK_ERRORS:
            pass
    called = function if method == "__call__" else getattr(function, method)
    name = f"numpy.{function.__name__}" + ("" if method == "__call__" else f".{method}")
    return _call_per_replica(called, inputs, kwargs, name)


def _is_operator() -> bool:
    """Whether the code that called a ufunc has an operator there. np.float32(2) ** x with a
    MappedArray calls np.power, and with a scalar the C library's pow."""
    frame = sys._getframe(2)
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "BINARY_OP"


def _call_per_replica(
    called: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> Any:
    """Call a function that no rule served once per replica.

    **Raises**:

    - TypeError: if NumPy's arrays are mixed with a GPU's.
    - The GPU library's own error, which then says what the library lacks.
    """
    arrays = [unpack(leaf)[0] for leaf in trees.flatten((args, kwargs))[0]]
    of_one_library(name, arrays)
    try:
        return call_per_replica(called, args, kwargs, name)
    except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
        lack = _lack([array for array in arrays if on_device(array)], name, kwargs, error)
        if lack is None:
            raise
        kind = NotImplementedError if isinstance(error, NotImplementedError) else TypeError
        raise kind(f"{lack}; cupy.asnumpy moves the map's arguments to the host") from error


def _lack(arrays: list[Any], name: str, kwargs: dict[str, Any], error: Exception) -> str | None:
    """The part of a NumPy function that a GPU's library lacks, if the call failed for that."""
    if not arrays:
        return None
    package = type(arrays[0]).__module__.partition(".")[0]
    found: Any = sys.modules[package]
    library = f"CuPy {found.__version__}"
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    if found is None or isinstance(error, NotImplementedError):
        return f"{library} lacks {name}"
    if kwargs and "argument" in str(error):
        return f"{library}'s {name} lacks one of the arguments {', '.join(kwargs)} ({error})"
    held = next((array.dtype for array in arrays if lacks_kernels(array.dtype)), None)
    if held is not None:
        return f"{library} lacks {name} of {held}, which it only holds: convert it by astype"
    return None


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _is_array(out: Any) -> bool:
    return out is not None and out is not Ellipsis


@cache
def _place_of_out(called: Callable[..., Any]) -> int:
    """The position of the parameter `out`; beyond all arguments where it has none."""
    try:
        parameters = inspect.signature(called).parameters.values()
    except ValueError:
        return sys.maxsize
    for place, parameter in enumerate(parameters):
        if parameter.name == "out" and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            return place
    return sys.maxsize


def call_function(
    array: Any,
    called: Callable[..., Any],
    types: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """__array_function__: called(*args, **kwargs), batched if the NumPy function has a rule."""
    if "out" in kwargs and kwargs["out"] is None:
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
    place = _place_of_out(called)
    if "out" in kwargs or (len(args) > place and args[place] is not None):
        return WRITERS["function"](called, args, kwargs, place)
    if called in WRITERS:
        return WRITERS[called](*args, **kwargs)
    batched = RULES.get(called)
    if batched is not None and (called in WITHOUT_VALUES or not fallback_settings().force):
        try:
            result = batched(*args, **kwargs)
            if called in ARRAYS_0D or called in METHODS_0D:
                result = _as_numpy_returns(called, args, result)
            if args and type(args[0]) in INDIRECT:
                return WRITERS["views"](args[0], result, called)
            return result
        except FALLBACK_ERRORS:
            pass
    if called in MOVES and (dtype := _held_dtype(args)) is not None:
        first, *others = args
        bits = trees.map(lambda part: part.view(f"u{dtype.itemsize}"), first)
        return call_function(array, called, types, (bits, *others), kwargs).view(dtype)
    if called in CREATE and (like := library_here()) is not None:
        return wrap_array(called(*args, **kwargs, like=like), ())
    return _call_per_replica(called, args, kwargs, name_of(called))


def get_item(array: Any, index: Any) -> Any:
    """array[index], batched."""
    if not fallback_settings().force:
        try:
            return RULES[operator.getitem](array, index)
        except NoRule:
            pass
        except ValueError:
            if _held_dtype((array,)) is None:
                raise
            return get_item(array.view(f"u{array.itemsize}"), index).view(array.dtype)
    return call_per_replica(operator.getitem, (array, index), {}, "indexing")


def _held_dtype(args: tuple[Any, ...]) -> np.dtype[Any] | None:
    """The dtype of the arrays in the first argument, if a GPU's library has no kernels for it."""
    parts = trees.flatten(args[0])[0] if args else []
    dtypes = {part.dtype if isinstance(part, MappedArray) else None for part in parts}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    held = dtype is not None and lacks_kernels(dtype) and on_device(unpack(parts[0])[0])
    return dtype if held else None


def power(base: Any, exponent: Any) -> Any:
    """base ** exponent, which is not quite np.power."""
    return call_function(None, operator.pow, (), (base, exponent), {})


def round_scalar(number: Any, *ndigits: Any) -> Any:
    """Python's round(number, *ndigits)."""
    return call_function(None, round, (), (number, *ndigits), {})


def install(mapped_array: type[MappedArray]) -> None:
    """Attach NumPy's protocols, indexing, round and ``**``, which this module's rules compute."""
    mapped_array.__array_ufunc__ = call_ufunc
    mapped_array.__array_function__ = call_function
    mapped_array.__getitem__ = get_item
    mapped_array.__round__ = round_scalar
    mapped_array.__pow__, mapped_array.__rpow__ = binary_operator(power)
