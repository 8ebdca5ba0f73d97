"""MappedArray: an array with hidden mapped axes, so that code for one replica runs for all.

The values of all replicas are one stacked array. Its shape and dtype are those of one replica's
part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from ... import trees
from ...collectives.kernels import convert
from ...libraries import copy_array, on_device, to_host
from ..axis_environment import Axes, check_active, lockstep_axes
from .conversions import conversion_error

Array = Any  # numpy.ndarray, or any array library's that follows NumPy's protocols


def unpack(value: Any) -> tuple[Array, Axes]:
    """The stacked data of `value`, and its leading mapped axes; () for other values."""
    if isinstance(value, MappedArray):
        axes = value._axes
        if axes:
            check_active(axes)
        return value._data, axes
    return value, ()


def holds_mapped(value: Any) -> bool:
    """Whether `value` is a MappedArray, or a list or tuple with one in it."""
    if isinstance(value, (list, tuple)):
        return any(map(holds_mapped, value))
    return isinstance(value, MappedArray)


def wrap(data: Array, axes: Axes) -> MappedArray:
    """The MappedArray with stacked `data`, whose leading axes are `axes`."""
    mapped = object.__new__(MappedArray)
    mapped._data = data
    mapped._axes = axes
    return mapped


def read_only(data: Array) -> Array:
    """A read-only view of a NumPy array; anything else as it is."""
    if isinstance(data, np.ndarray) and data.flags.writeable:
        data = data.view()
        data.flags.writeable = False
    return data


def lift(value: Any) -> Any:
    """`value` as the running function sees it: a MappedArray inside vmap."""
    return wrap(value, ()) if lockstep_axes() else value


def binary_operator(
    ufunc: Callable[[Any, Any], Any],
) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """The methods of an operator and of its reflection, __add__ and __radd__ for np.add."""

    def forward(self: Any, other: Any) -> Any:
        if getattr(other, "__array_ufunc__", ufunc) is None:
            return NotImplemented
        return ufunc(self, other)

    def reflected(self: Any, other: Any) -> Any:
        if getattr(other, "__array_ufunc__", ufunc) is None:
            return NotImplemented
        return ufunc(other, self)

    return forward, reflected


def _unary(ufunc: np.ufunc) -> Callable[[Any], Any]:
    return lambda self: ufunc(self)


def _refuse_in_place(name: str) -> Callable[..., NoReturn]:
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"MappedArray.{name} would change the array in place, and MappedArrays do not change: "
            "use x = x.at[index].set(value), or a function that returns a new array (np.sort)"
        )

    return method


class MappedArray:
    """The values of one variable on all replicas, with the interface of one replica's array.

    `shape`, `ndim`, `dtype` and `size` are one replica's. MappedArrays follow NumPy's protocols, so
    ``np.sin(x)``, ``x @ w`` and ``x[1:, i]`` work for any array library. They do not change in
    place: ``x += y`` rebinds the name, ``x.at[i].set(v)`` returns a changed copy. A replicated one,
    which is mapped over no axis, converts to bool, int, float and ndarray; converting another is a
    TypeError.

    `gpusim.vmap` and `gpusim.shard_map` make them; users do not.

    >>> import numpy as np, gpusim
    >>> def f(x):
    ...     print(x.shape, x.dtype)
    ...     return np.sqrt(x).sum()
    >>> gpusim.vmap(f)(np.array([[1.0, 4.0], [9.0, 16.0]]))
    (2,) float64
    array([3., 7.])
    """

    __slots__ = ("_axes", "_data")
    __array_priority__ = 1000.0
    _data: Array
    _axes: Axes

    # Attached by `dispatch.install` and `updates.install`: batched rules need this class.
    __array_ufunc__: Callable[..., Any]
    __array_function__: Callable[..., Any]
    __getitem__: Callable[..., Any]
    __pow__: Callable[..., Any]
    __round__: Callable[..., Any]
    __rpow__: Callable[..., Any]
    at: Any

    def __init__(self) -> None:
        raise TypeError("MappedArrays are made by gpusim.vmap and gpusim.shard_map, not by users")

    # One replica's shape and dtype.

    @property
    def shape(self) -> tuple[int, ...]:
        """One replica's shape."""
        return tuple(self._data.shape[len(self._axes) :])

    @property
    def ndim(self) -> int:
        """One replica's number of axes."""
        return self._data.ndim - len(self._axes)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, the same on all replicas."""
        return self._data.dtype

    @property
    def size(self) -> int:
        """One replica's number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self._data.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of one replica's elements."""
        return self.size * self.itemsize

    @property
    def mapped_axes(self) -> tuple[Any, ...]:
        """The names of the axes along which the values may differ, outermost first."""
        return tuple(entry.name for entry in self._axes)

    # Conversions.

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        data = self._only_value("np.asarray")
        array = np.array(data, dtype=dtype, copy=copy)  # a TypeError of a GPU's library
        if array.base is not None or array is data:
            array = array.view()
            array.flags.writeable = False
        return array

    def _only_value(self, conversion: str) -> Array:
        data, axes = unpack(self)
        if axes:
            names = ", ".join(repr(entry.name) for entry in axes)
            raise conversion_error(conversion, f"shape {self.shape}, dtype {self.dtype}", names)
        return data

    def __bool__(self) -> bool:
        return bool(self._only_value("bool()"))

    def __int__(self) -> int:
        return int(self._only_value("int()"))

    def __float__(self) -> float:
        return float(self._only_value("float()"))

    def __complex__(self) -> complex:
        return complex(self._only_value("complex()"))

    def __index__(self) -> int:
        data = to_host(self._only_value("an integer index"))
        return data.__index__()  # ndarray's own TypeError for floats and larger shapes

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        if self.ndim:
            raise TypeError("unsupported format string passed to MappedArray.__format__")
        if not self._axes:
            return format(self._data[()], spec)
        return np.array2string(
            to_host(self._data),
            separator=", ",
            formatter={"all": lambda value: format(value, spec)},
        )

    def item(self, *args: Any) -> Any:
        """The one element as a Python scalar; TypeError if it may differ between replicas."""
        return to_host(self._only_value(".item()")).item(*args)

    def tolist(self) -> Any:
        """Nested lists of Python scalars; TypeError if the values may differ between replicas."""
        return self._only_value(".tolist()").tolist()

    def tobytes(self, order: Any = "C") -> bytes:
        """The raw bytes; TypeError if the values may differ between replicas."""
        return self._only_value(".tobytes()").tobytes(order)

    def __len__(self) -> int:
        if self.ndim == 0:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if self.ndim == 0:
            raise TypeError("iteration over a 0-d array")
        return (self[place] for place in range(self.shape[0]))

    def __contains__(self, value: Any) -> Any:
        return bool(np.any(self == value))

    __setitem__ = _refuse_in_place("__setitem__ (x[index] = value)")
    __delitem__ = _refuse_in_place("__delitem__")
    __hash__ = None  # type: ignore[assignment]  # as ndarray: == is elementwise

    def __copy__(self) -> MappedArray:
        return self

    def __deepcopy__(self, memo: Any) -> MappedArray:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a MappedArray cannot be pickled: return it from the mapped function first")

    def __repr__(self) -> str:
        over = ", ".join(f"{entry.name!r}: {entry.size}" for entry in self._axes) or "nothing"
        values = np.array2string(to_host(self._data), separator=", ", prefix="MappedArray(")
        return f"MappedArray({values}, shape={self.shape}, dtype={self.dtype}, mapped over {over})"

    # Operators. There are no in-place ones: `x += y` falls back on `x = x + y`.

    __add__, __radd__ = binary_operator(np.add)
    __sub__, __rsub__ = binary_operator(np.subtract)
    __mul__, __rmul__ = binary_operator(np.multiply)
    __truediv__, __rtruediv__ = binary_operator(np.true_divide)
    __floordiv__, __rfloordiv__ = binary_operator(np.floor_divide)
    __mod__, __rmod__ = binary_operator(np.remainder)
    __divmod__, __rdivmod__ = binary_operator(np.divmod)
    __matmul__, __rmatmul__ = binary_operator(np.matmul)
    __lshift__, __rlshift__ = binary_operator(np.left_shift)
    __rshift__, __rrshift__ = binary_operator(np.right_shift)
    __and__, __rand__ = binary_operator(np.bitwise_and)
    __or__, __ror__ = binary_operator(np.bitwise_or)
    __xor__, __rxor__ = binary_operator(np.bitwise_xor)
    __lt__, _ = binary_operator(np.less)
    __le__, _ = binary_operator(np.less_equal)
    __gt__, _ = binary_operator(np.greater)
    __ge__, _ = binary_operator(np.greater_equal)
    __eq__, _ = binary_operator(np.equal)
    __ne__, _ = binary_operator(np.not_equal)
    __neg__ = _unary(np.negative)
    __pos__ = _unary(np.positive)
    __abs__ = _unary(np.absolute)
    __invert__ = _unary(np.invert)
    del _

    # ndarray's methods, each the NumPy function of the same name. The signatures are ndarray's.

    @property
    def T(self) -> Any:
        """The transposed array."""
        return np.transpose(self)

    @property
    def mT(self) -> Any:
        """The array with its last two axes exchanged."""
        return np.matrix_transpose(self)

    @property
    def real(self) -> Any:
        """The real part."""
        return np.real(self)

    @property
    def imag(self) -> Any:
        """The imaginary part."""
        return np.imag(self)

    @property
    def flat(self) -> Iterator[Any]:
        """The elements in C order, one by one."""
        return iter(np.ravel(self))

    def astype(
        self,
        dtype: Any,
        order: Any = "K",
        casting: Any = "unsafe",
        subok: bool = True,
        copy: bool = True,
    ) -> MappedArray:
        """The array converted to `dtype`."""
        data, axes = unpack(self)
        if on_device(data):  # CuPy's astype knows no casting
            if not np.can_cast(data.dtype, dtype, casting):
                raise TypeError(f"cannot cast {data.dtype} to {np.dtype(dtype)} by {casting!r}")
            converted = convert(data, dtype)
            return wrap(copy_array(data) if copy and converted is data else converted, axes)
        return wrap(data.astype(dtype, casting=casting, copy=copy), axes)

    def view(self, dtype: Any) -> MappedArray:
        """The same bits as another dtype."""
        data, axes = unpack(self)
        if self.ndim == 0 and np.dtype(dtype).itemsize != self.itemsize:
            raise ValueError(
                "Changing the dtype of a 0d array is only supported if the itemsize is unchanged"
            )
        return wrap(data.view(np.dtype(dtype)), axes)

    def copy(self, order: Any = "C") -> MappedArray:
        """A copy. It is rarely needed, as MappedArrays do not change."""
        data, axes = unpack(self)
        return wrap(copy_array(data), axes)

    def reshape(self, *shape: Any, order: Any = "C", copy: bool | None = None) -> Any:
        """The array in another shape: ``x.reshape(2, -1)`` or ``x.reshape((2, -1))``."""
        return np.reshape(self, shape[0] if len(shape) == 1 else shape, order=order)

    def transpose(self, *axes: Any) -> Any:
        """The array with its axes permuted (reversed by default)."""
        return np.transpose(self, axes[0] if len(axes) == 1 else axes or None)

    def flatten(self, order: Any = "C") -> Any:
        """A 1-D copy."""
        return np.ravel(self, order)

    def conj(self) -> Any:
        """The complex conjugate."""
        return np.conjugate(self)

    def clip(self, min: Any = None, max: Any = None, out: Any = None, **kwargs: Any) -> Any:
        """The array with its values brought between `min` and `max`."""
        return np.clip(self, min, max, out=out, **kwargs)

    def compress(self, condition: Any, axis: Any = None, out: Any = None) -> Any:
        """The slices along `axis` where `condition` is true."""
        return np.compress(condition, self, axis, out=out)

    def dot(self, other: Any) -> Any:
        """np.dot(self, other)."""
        return np.dot(self, other)

    sort = _refuse_in_place("sort")
    fill = _refuse_in_place("fill")
    put = _refuse_in_place("put")
    partition = _refuse_in_place("partition")
    resize = _refuse_in_place("resize")
    itemset = _refuse_in_place("itemset")
    setfield = _refuse_in_place("setfield")


def _method(name: str) -> Callable[..., Any]:
    function = getattr(np, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    method.__name__ = name
    method.__qualname__ = f"MappedArray.{name}"
    method.__doc__ = f"np.{name} of this array, with ndarray.{name}'s arguments."
    return method


for _name in (
    "all any argmax argmin argpartition argsort choose cumprod cumsum diagonal "
    "max mean min nonzero prod ravel repeat round searchsorted squeeze std sum swapaxes take "
    "trace var"
).split():
    setattr(MappedArray, _name, _method(_name))
MappedArray.conjugate = MappedArray.conj  # type: ignore[attr-defined]  # the second name of conj


trees.LEAF_TYPES.add(MappedArray)
