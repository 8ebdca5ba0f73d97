"""Array libraries: NumPy, and GPU libraries that follow its protocols, such as CuPy.
The differences between them that matter before NumPy's functions are called on an array."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpusim import fallback
from gpusim.fallback import limits

__all__ = [
    "on_device",
    "refuse_subclasses",
    "in_native_order",
    "lacks_kernels",
    "as_bits",
    "call_on_bits",
    "to_host",
    "to_library_of",
    "constant_like",
    "zeros_like",
    "empty_like",
    "allocate",
    "copy_array",
    "contiguous",
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


_REFUSED = {
    np.ma.MaskedArray: "a masked array, whose mask collectives do not know; expected "
    "x.filled(value), or x.data and np.ma.getmaskarray(x) as two arrays",
    np.matrix: "an np.matrix, which multiplies and indexes in its own way; expected np.asarray(x)",
}


def refuse_subclasses(value: Any, what: str) -> None:
    """Refuse arrays whose meaning an exchange of their elements would lose.

    **Raises**:

    - ValueError: for masked arrays, as in JAX, and for np.matrix.
    """
    for kind, words in _REFUSED.items():
        if isinstance(value, kind):
            raise ValueError(f"{what} is {words}")


def in_native_order(array: Array) -> Array:
    """A copy in the machine's byte order."""
    return array.astype(array.dtype.newbyteorder("="))


def lacks_kernels(dtype: np.dtype[Any]) -> bool:
    """Whether CuPy only holds arrays of this dtype: those of ml_dtypes, except bfloat16.

    CuPy views such arrays. It has no kernels for them, and it does not allocate them.

    >>> import ml_dtypes
    >>> [lacks_kernels(np.dtype(d)) for d in (np.float16, "bfloat16", ml_dtypes.float8_e5m2)]
    [False, False, True]
    """
    return dtype.isbuiltin == 2 and dtype.name != "bfloat16"


def as_bits(array: Array) -> Array:
    """The array; as unsigned integers if it is on a GPU and its library has no kernels for it."""
    if type(array) is np.ndarray or not lacks_kernels(array.dtype) or not on_device(array):
        return array
    return array.view(f"u{array.dtype.itemsize}")


def call_on_bits(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """function(*args, **options), which moves elements into one array and computes nothing.

    Arrays of a dtype that a GPU's library only holds (see `lacks_kernels`) are moved as unsigned
    integers, and the result has their dtype again.

    **Arguments**: `function`, and its arguments: arrays, sequences of arrays, or anything else.
    """
    held: set[np.dtype[Any]] = set()

    def lower(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(lower, value))
        bits = as_bits(value) if on_device(value) else value
        if bits is not value:
            held.add(value.dtype)
        return bits

    lowered = [lower(value) for value in args]
    if len(held) != 1:
        return function(*args, **options)
    return function(*lowered, **options).view(held.pop())


def to_host(value: Any) -> NDArray[Any]:
    """The values as a NumPy array; for an array on a GPU this copies, and waits for its stream."""
    if not on_device(value):
        return np.asarray(value)
    bits = as_bits(value)
    host: NDArray[Any] = bits.get()
    return host if bits is value else host.view(value.dtype)


def to_library_of(like: Any, values: Any, dtype: DTypeLike | None = None) -> Array:
    """Values of the host as an array of the library of `like`: a copy where that is on a GPU."""
    if on_device(values):
        return values if dtype is None else values.astype(dtype, copy=False)
    if not on_device(like):
        return np.asarray(values, dtype)
    host = np.asarray(values, dtype)
    if lacks_kernels(host.dtype):
        return np.asarray(host.view(f"u{host.dtype.itemsize}"), like=like).view(host.dtype)
    return np.asarray(host, like=like)


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
    """Zeros in C order, of the array's library; of its dtype if none is given."""
    return _create_like(np.zeros_like, array, shape, dtype)


def empty_like(array: Any, shape: tuple[int, ...], dtype: DTypeLike | None = None) -> Array:
    """An array in C order with nothing in it yet, of this one's library."""
    return _create_like(np.empty_like, array, shape, dtype)


def _create_like(
    create: Callable[..., Any], array: Any, shape: tuple[int, ...], dtype: DTypeLike | None
) -> Array:
    if not on_device(array):
        return create(array, dtype, order="C", shape=shape)
    like, given = as_bits(array), shape or (1,)  # CuPy takes the shape () for none given

    def create_on_device(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return create(like, dtype, order="C", shape=given).reshape(shape)

    return allocate(create_on_device, shape, array.dtype if dtype is None else dtype)


def allocate(create: Callable[..., Any], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """create(shape, dtype), for any dtype; `create` is a GPU library's, such as cupy.empty."""
    kind = np.dtype(dtype)
    if not lacks_kernels(kind):
        return create(shape, kind)
    return create(shape, np.dtype(f"u{kind.itemsize}")).view(kind)


def copy_array(array: Array, order: Any = "C") -> Array:
    """A copy, in C order or in that of `order` ("K" keeps the layout)."""
    bits = as_bits(array)
    if type(bits) is np.ndarray and bits.size >= limits.SHARED_WORK and order == "C":
        copied = fallback.empty(bits.shape, bits.dtype)
        fallback.copy([(copied, bits)])
    else:
        copied = bits.copy(order=order)
    return copied if bits is array else copied.view(array.dtype)


def contiguous(array: Array) -> Array:
    """The array itself where it is C-contiguous, else a copy."""
    return array if array.flags.c_contiguous else copy_array(array)


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
    bits = as_bits(copies).reshape(len(copies), -1).copy().view(np.uint8)
    unlike = np.any(bits != bits[:1], axis=1)
    found = int(np.argmax(unlike))  # of the first True, else 0, which is like itself
    return found or None


def owner(array: Any) -> Any:
    """The array that owns the memory of `array`."""
    base = array.base
    while base is not None and isinstance(base, (np.ndarray, type(array))):
        array, base = base, base.base
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
