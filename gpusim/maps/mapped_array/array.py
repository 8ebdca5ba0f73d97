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
from ...libraries import copy_array, on_device, owner, reshaped_view, to_host
from ..axis_environment import Axes, check_active, lockstep_axes
from .conversions import conversion_error
from .memory import follow, is_writable, moves, vary

Array = Any  # numpy.ndarray, or any array library's that follows NumPy's protocols


def unpack(value: Any) -> tuple[Array, Axes]:
    """The stacked data of `value`, and its leading mapped axes; () for other values."""
    if isinstance(value, MappedArray):
        if moves:
            follow(value)
        axes = value._axes
        for entry in axes:
            if not entry.active:
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


def wrap_array(data: Array, axes: Axes) -> MappedArray:
    """As `wrap`, but what has no visible axes is a 0-d array, and no NumPy scalar."""
    if data.ndim > len(axes):
        mapped = object.__new__(MappedArray)
    else:
        mapped = object.__new__(ZeroDimensional)
        data = np.asarray(data) if isinstance(data, np.generic) else data
    mapped._data = data
    mapped._axes = axes
    return mapped


def is_scalar(value: Any) -> bool:
    """Whether one replica's value is a NumPy scalar, which does not change in place."""
    return type(value) is MappedArray and value._data.ndim == len(value._axes)


def _refuse_scalar(value: Any, name: str) -> None:
    if is_scalar(value):
        raise AttributeError(f"attribute {name!r} of 'numpy.generic' objects is not writable")


def wrap_like(value: Any, data: Array, axes: Axes) -> MappedArray:
    """A view or a method's result of `value`: a scalar's is a scalar, an array's an array."""
    return wrap(data, axes) if is_scalar(value) else wrap_array(data, axes)


def make_writable(target: MappedArray, axes: Axes, destination: str) -> None:
    """Prepare a MappedArray to be written with values that are mapped over `axes`.

    **Raises**:

    - ValueError: if it is read-only; NumPy's, which begins with `destination`.
    """
    data, own = unpack(target)
    if not is_writable(data):
        raise ValueError(
            f"{destination} is read-only, as arguments of a map are: change a copy "
            "(x = x.copy()), or make a new array (x = x + y)"
        )
    if any(entry not in own for entry in axes):
        vary(target, axes)


def read_only(data: Array) -> Array:
    """A read-only view of a NumPy array; anything else as it is."""
    if isinstance(data, np.ndarray) and data.flags.writeable:
        data = data.view()
        data.setflags(write=False)
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


def _in_place(ufunc: np.ufunc) -> Callable[[Any, Any], Any]:
    """The method of an augmented operator. NumPy's scalars do not change: the name is rebound."""
    forward, _ = binary_operator(ufunc)

    def method(self: Any, other: Any) -> Any:
        if self._data.ndim == len(self._axes) and type(self) is MappedArray:
            return forward(self, other)
        if getattr(other, "__array_ufunc__", ufunc) is None:
            return NotImplemented
        return ufunc(self, other, out=(self,))

    return method


def _refuse(name: str, cure: str) -> Callable[..., NoReturn]:
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"a MappedArray has no {name}: use {cure}")

    return method


class MappedArray:
    """The values of one variable on all replicas, with the interface of one replica's array.

    `shape`, `ndim`, `dtype` and `size` are one replica's. MappedArrays follow NumPy's protocols, so
    ``np.sin(x)``, ``x @ w`` and ``x[1:, i]`` work for any array library. They change in place as
    NumPy's arrays do (``x += y``, ``x[0] = 1``, ``out=x``), and views share their memory; arguments
    of a map are read-only. ``x.at[i].set(v)`` returns a changed copy. A replicated one, which is
    mapped over no axis, converts to bool, int, float and ndarray; converting another is a
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

    # Attached by the modules' `install`: batched rules need this class.
    __array_ufunc__: Callable[..., Any]
    __array_function__: Callable[..., Any]
    __getitem__: Callable[..., Any]
    __setitem__: Callable[..., None]
    __ipow__: Callable[..., Any]
    __imatmul__: Callable[..., Any]
    sort: Callable[..., None]
    partition: Callable[..., None]
    put: Callable[..., None]
    fill: Callable[..., None]
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

    @shape.setter
    def shape(self, shape: Any) -> None:
        _refuse_scalar(self, "shape")
        data, axes = unpack(self)
        shape = shape if isinstance(shape, tuple) else (shape,)
        stacked = (*data.shape[: len(axes)], *shape)
        try:
            self._data = reshaped_view(data, stacked)
        except ValueError:
            np.reshape(data[(0,) * len(axes)], shape)  # NumPy's error for another size
            raise AttributeError(
                "Incompatible shape for in-place modification. Use `.reshape()` to make a copy "
                "with the desired shape."
            ) from None

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
        if moves:
            follow(self)
        return tuple(entry.name for entry in self._axes)

    # Conversions.

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        data = self._only_value("np.asarray")
        if copy is None and isinstance(data, np.ndarray) and data.flags.writeable:
            copy = True  # what is written later may vary, and a plain array cannot follow
        array = np.array(data, dtype=dtype, copy=copy)  # a TypeError of a GPU's library
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

    __delitem__ = _refuse("elements to delete", "np.delete")
    __hash__ = None  # type: ignore[assignment]  # as ndarray: == is elementwise

    def __copy__(self) -> MappedArray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> MappedArray:
        return self.copy()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a MappedArray cannot be pickled: return it from the mapped function first")

    def __repr__(self) -> str:
        if moves:
            follow(self)
        over = ", ".join(f"{entry.name!r}: {entry.size}" for entry in self._axes) or "nothing"
        values = np.array2string(to_host(self._data), separator=", ", prefix="MappedArray(")
        return f"MappedArray({values}, shape={self.shape}, dtype={self.dtype}, mapped over {over})"

    # Operators.

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
    __iadd__ = _in_place(np.add)
    __isub__ = _in_place(np.subtract)
    __imul__ = _in_place(np.multiply)
    __itruediv__ = _in_place(np.true_divide)
    __ifloordiv__ = _in_place(np.floor_divide)
    __imod__ = _in_place(np.remainder)
    __ilshift__ = _in_place(np.left_shift)
    __irshift__ = _in_place(np.right_shift)
    __iand__ = _in_place(np.bitwise_and)
    __ior__ = _in_place(np.bitwise_or)
    __ixor__ = _in_place(np.bitwise_xor)
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

    @real.setter
    def real(self, value: Any) -> None:
        _refuse_scalar(self, "real")
        np.real(self)[...] = value

    @property
    def imag(self) -> Any:
        """The imaginary part."""
        return np.imag(self)

    @imag.setter
    def imag(self, value: Any) -> None:
        _refuse_scalar(self, "imag")
        if self.dtype.kind != "c":
            raise TypeError("array does not have imaginary part to set")
        np.imag(self)[...] = value

    @property
    def flat(self) -> Flat:
        """The elements in C order, to be read one by one or by index, and written by index."""
        return Flat(self)

    @flat.setter
    def flat(self, value: Any) -> None:
        _refuse_scalar(self, "flat")
        Flat(self)[:] = value

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
            converted = copy_array(data) if copy and converted is data else converted
        else:
            converted = data.astype(dtype, casting=casting, copy=copy)
        return self if converted is data else wrap_like(self, converted, axes)

    def view(self, dtype: Any = None) -> MappedArray:
        """The same bits, as another dtype if one is given: a view."""
        data, axes = unpack(self)
        if dtype is None:
            return wrap_like(self, data.view(), axes)
        if self.ndim == 0 and np.dtype(dtype).itemsize != self.itemsize:
            raise ValueError(
                "Changing the dtype of a 0d array is only supported if the itemsize is unchanged"
            )
        return wrap_like(self, data.view(np.dtype(dtype)), axes)

    def copy(self, order: Any = "C") -> MappedArray:
        """A copy, which is writable."""
        data, axes = unpack(self)
        return wrap_like(self, copy_array(data), axes)

    def reshape(self, *shape: Any, order: Any = "C", copy: bool | None = None) -> Any:
        """The array in another shape: ``x.reshape(2, -1)`` or ``x.reshape((2, -1))``."""
        return np.reshape(self, shape[0] if len(shape) == 1 else shape, order=order)

    def transpose(self, *axes: Any) -> Any:
        """The array with its axes permuted (reversed by default)."""
        return np.transpose(self, axes[0] if len(axes) == 1 else axes or None)

    def flatten(self, order: Any = "C") -> Any:
        """A 1-D copy."""
        flat = np.ravel(self, order)
        shared = owner(unpack(flat)[0]) is owner(unpack(self)[0])
        return flat.copy() if shared else flat

    def conj(self) -> Any:
        """The complex conjugate; the array itself if it is real, as in NumPy."""
        real = self.dtype.kind in "biuf" and self.dtype.isbuiltin != 2
        return self if real else np.conjugate(self)

    def clip(self, min: Any = None, max: Any = None, out: Any = None, **kwargs: Any) -> Any:
        """The array with its values brought between `min` and `max`."""
        return np.clip(self, min, max, out=out, **kwargs)

    def compress(self, condition: Any, axis: Any = None, out: Any = None) -> Any:
        """The slices along `axis` where `condition` is true."""
        return np.compress(condition, self, axis, out=out)

    def dot(self, other: Any) -> Any:
        """np.dot(self, other)."""
        return np.dot(self, other)

    resize = _refuse("resize", "np.resize, which returns another array")
    itemset = _refuse("itemset", "x[index] = value")
    setfield = _refuse("setfield", "x.view(dtype), which shares the memory")
    byteswap = _refuse("byteswap", "x.astype with the dtype's newbyteorder")
    setflags = _refuse("setflags", "np.broadcast_to(x, x.shape), which is a read-only view")


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


class ZeroDimensional(MappedArray):
    """A MappedArray without visible axes that is an array: it changes in place, as scalars do not.

    NumPy returns scalars from most functions (``x.sum()``, ``x[0]``), and such arrays from few
    (``np.zeros(())``, ``x[0, ...]``).
    """

    __slots__ = ()


class Flat:
    """The elements of a MappedArray in C order, as ndarray.flat has them."""

    __slots__ = ("array",)
    __setitem__: Callable[..., None]

    def __init__(self, array: MappedArray) -> None:
        self.array = array

    def __iter__(self) -> Iterator[Any]:
        return iter(np.ravel(self.array))

    def __len__(self) -> int:
        return self.array.size

    def __getitem__(self, index: Any) -> Any:
        found = np.ravel(self.array)[index]
        return found if is_scalar(found) else found.copy()


trees.LEAF_TYPES.update((MappedArray, ZeroDimensional))
