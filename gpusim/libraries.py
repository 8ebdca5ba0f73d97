"""Array libraries: NumPy, and GPU libraries that follow its protocols, such as CuPy.
The differences between them that matter before NumPy's functions are called on an array."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = [
    "on_device",
    "to_host",
    "to_library_of",
    "constant_like",
    "zeros_like",
    "empty_like",
    "reshaped_view",
    "first_unlike",
    "owner",
    "of_one_library",
]

Array = Any


_KINDS: dict[type, bool] = {}  # of types that have been asked about


def on_device(value: Any) -> bool:
    """Whether `value` is an array on a GPU, of a library that follows NumPy's protocols.

    >>> on_device(np.zeros(3)), on_device(1.5)
    (False, False)
    """
    kind = type(value)
    known = _KINDS.get(kind)
    if known is None:
        interfaces = ("__cuda_array_interface__", "__array_function__")
        known = _KINDS[kind] = all(hasattr(kind, name) for name in interfaces)
    return known


def to_host(value: Any) -> NDArray[Any]:
    """The values as a NumPy array; for an array on a GPU this copies, and waits for its stream."""
    host: NDArray[Any] = value.get() if on_device(value) else np.asarray(value)
    return host


def to_library_of(like: Any, values: Any, dtype: DTypeLike | None = None) -> Array:
    """Values of the host as an array of the library of `like`: a copy where that is on a GPU."""
    if on_device(values):
        return values if dtype is None else values.astype(dtype, copy=False)
    if not on_device(like):
        return np.asarray(values, dtype)
    return np.asarray(np.asarray(values, dtype), like=like)


def constant_like(like: Any, value: Any) -> Any:
    """`value`, moved to the library of `like` if it is a list, a tuple or a 0-d array of NumPy.

    NumPy's functions take lists, and scalars go with arrays of any library, but a GPU's functions
    take no lists, and NumPy's 0-d arrays go with no GPU's.
    """
    if not on_device(like) or on_device(value):
        return value
    listed = isinstance(value, (list, tuple))
    single = isinstance(value, np.ndarray) and value.ndim == 0
    return to_library_of(like, value) if listed or single else value


def zeros_like(array: Any, shape: tuple[int, ...], dtype: DTypeLike | None = None) -> Array:
    """Zeros in C order. (CuPy takes the shape () for none given.)"""
    if shape == () and on_device(array):
        return np.zeros_like(array, dtype, order="C", shape=(1,)).reshape(())
    return np.zeros_like(array, dtype, order="C", shape=shape)


def empty_like(array: Any, shape: tuple[int, ...], dtype: DTypeLike | None = None) -> Array:
    """An array in C order with nothing in it yet."""
    if shape == () and on_device(array):
        return np.empty_like(array, dtype, order="C", shape=(1,)).reshape(())
    return np.empty_like(array, dtype, order="C", shape=shape)


def reshaped_view(array: Any, shape: tuple[int, ...]) -> Array:
    """The array in another shape, as a view; ValueError where that takes a copy."""
    if on_device(array):  # older CuPys do not know copy=False, so strides are looked at here
        memory = np.broadcast_to(np.empty((), array.dtype), array.shape)
        if array.size:
            memory = np.lib.stride_tricks.as_strided(memory, array.shape, array.strides)
        np.reshape(memory, shape, copy=False)
        return array.reshape(shape)
    return np.reshape(array, shape, copy=False)


def first_unlike(copies: Array) -> int | None:
    """The first of the stacked copies with other bits than copy 0; None where there is none.

    >>> first_unlike(np.array([[0.0, np.nan], [0.0, np.nan], [-0.0, np.nan]]))
    2
    """
    if not on_device(copies):
        bits = copies[0].tobytes()
        others = range(1, len(copies))
        return next((k for k in others if copies[k].tobytes() != bits), None)
    if not copies[0].size:
        return None
    bits = copies.reshape(len(copies), -1).copy().view(np.uint8)
    unlike = np.any(bits != bits[:1], axis=1)
    found = int(np.argmax(unlike))  # of the first True, else 0, which is like itself
    return found or None


def owner(array: Any) -> Any:
    """The array that owns the memory of `array`."""
    while isinstance(array.base, (np.ndarray, type(array))):
        array = array.base
    return array


def of_one_library(what: str, values: Iterable[Any]) -> None:
    """Refuse NumPy's arrays beside those of a GPU.

    **Raises**:

    - TypeError: that says which arrays, and how to move them.
    """
    arrays = [value for value in values if isinstance(value, np.ndarray) or on_device(value)]
    gpu = next((array for array in arrays if on_device(array)), None)
    host = next((array for array in arrays if not on_device(array)), None)
    if gpu is None or host is None:
        return
    names = [
        f"{type(array).__module__.partition('.')[0]} ({array.dtype}{list(array.shape)})"
        for array in (gpu, host)
    ]
    raise TypeError(
        f"{what} was given arrays of two libraries, {names[0]} and {names[1]}: move one to the "
        "other's memory first (cupy.asarray, cupy.asnumpy)"
    )
