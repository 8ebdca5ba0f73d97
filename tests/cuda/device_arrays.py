"""A strict stand-in for CuPy on machines without a GPU: arrays in memory that NumPy cannot see.

They have exactly CuPy's functions and keywords, refuse what CuPy refuses, and count launches.
Work on their streams is checked for races (device_streams.py).
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpusim.cuda import cache, launch
from gpusim.cuda import compile as compiling
from gpusim.maps.streams import pool
from gpusim.runtime.engines import nccl
from tests.cuda import device_streams as streams
from tests.cuda.cupy_surface import signature, surface
from tests.cuda.host_cuda.driver import driver

SCALARS = (bool, int, float, complex, np.generic)
NUMBER_OF_GPUS = 2


class Counted(SimpleNamespace):
    """Counts of kernels launched, and of arrays moved to the device and back."""

    launches: int
    uploads: int
    downloads: int
    lacking: list[str]  # the functions that CuPy lacks


counts = Counted(launches=0, uploads=0, downloads=0, lacking=[])


def _names_elements(index: Any) -> bool:
    """Whether an index of NumPy's has arrays of integers, which may name an element twice."""
    entries = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(entry, (list, np.ndarray)) and np.asarray(entry).dtype.kind in "iu"
        for entry in entries
    )


class Flags:
    """CuPy's flags."""

    def __init__(self, flags: Any) -> None:
        self.c_contiguous: bool = flags.c_contiguous
        self.f_contiguous: bool = flags.f_contiguous
        self.owndata: bool = flags.owndata


class DeviceArray:
    """An array as cupy.ndarray is one: `_host` holds what would be in the GPU's memory."""

    __slots__ = ("__weakref__", "_host", "base", "device")
    __module__ = "cupy"
    __array_priority__ = 100

    def __init__(self, host: np.ndarray, base: DeviceArray | None = None) -> None:
        assert type(host) is np.ndarray
        self._host = host
        self.base = base
        self.device = base.device if base is not None else streams.current_device()

    shape = property(lambda self: self._host.shape)
    strides = property(lambda self: self._host.strides)
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    itemsize = property(lambda self: self._host.itemsize)
    nbytes = property(lambda self: self._host.nbytes)
    flags = property(lambda self: Flags(self._host.flags))
    data = property(lambda self: SimpleNamespace(ptr=self._host.ctypes.data))
    T = property(lambda self: _made(self._host.T, (self,)))
    mT = property(lambda self: _made(self._host.mT, (self,)))
    real = property(
        lambda self: _made(self._host.real, (self,)), lambda self, v: _assign(self.real, v)
    )
    imag = property(
        lambda self: _made(self._host.imag, (self,)), lambda self, v: _assign(self.imag, v)
    )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._host.__array_interface__

    # To the host, only on request.

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct "
            "a NumPy array explicitly."
        )

    def get(self, stream: Any = None, order: str = "C", out: Any = None) -> np.ndarray:
        counts.downloads += 1
        with streams.Device(self.device.id):  # whichever is current
            streams.finish_reading(self)
        return np.array(self._host, order=order)

    def item(self) -> Any:
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def tobytes(self, order: str = "C") -> bytes:
        return self.get().tobytes(order)

    def __bool__(self) -> bool:
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __complex__(self) -> complex:
        return complex(self.get())

    def __format__(self, spec: str) -> str:
        return format(self.get()[()], spec)

    def __repr__(self) -> str:
        return repr(self.get())

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Iterator[DeviceArray]:
        if self.ndim == 0:
            raise TypeError("iteration over a 0-d array")
        return (self[place] for place in range(len(self)))

    __hash__ = None

    # Indexing takes NumPy's arrays and lists as indices, and only arrays of the device as values.

    def __getitem__(self, index: Any) -> DeviceArray:
        found = self._host[_index(index)]
        if isinstance(found, np.generic):  # NumPy makes it a scalar; here it is a view
            entries = index if isinstance(index, tuple) else (index,)
            found = self._host[(*_index(entries), ...)]
        return _made(found, (self, *_in_index(index)))

    def __setitem__(self, index: Any, value: Any) -> None:
        _check_dtypes((self, value))
        streams.launched((self, value, *_in_index(index)), (self,))
        counts.launches += 1
        host, place = _host(value, "an assigned value"), _index(index)
        self._host[place] = host
        if _names_elements(place) and np.ndim(host):  # a GPU writes in any order: now backwards
            numbers = np.arange(self.size).reshape(self.shape)[place]
            backwards = np.broadcast_to(host, numbers.shape).reshape(-1)[::-1]
            self._host[np.unravel_index(numbers.reshape(-1)[::-1], self.shape)] = backwards

    # NumPy's protocols, answered as CuPy answers them.

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        name = ".".join([*func.__module__.split(".")[1:], func.__name__])
        if name not in surface():
            counts.lacking.append(name)
            return NotImplemented
        if not all(issubclass(kind, (DeviceArray, np.ndarray)) for kind in types):
            return NotImplemented
        return call(name, args, kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        name = ufunc.__name__
        if name not in surface():
            counts.lacking.append(name)
            return NotImplemented
        if method not in UFUNC_METHODS or name not in UFUNC_METHODS[method]:
            counts.lacking.append(f"{name}.{method}")
            raise NotImplementedError(f"`{name}.{method}` is not supported yet")
        if not all(isinstance(value, (DeviceArray, np.ndarray, *SCALARS)) for value in inputs):
            return NotImplemented  # of lists, and of tuples as the indices of `at`
        if method == "at" and inputs[0].dtype.name not in SCATTER[name]:
            raise TypeError(f"`{name}.at` is not supported for {inputs[0].dtype}")
        out = kwargs.pop("out", None)
        if out is not None:
            (out,) = out
        allowed = {"reduce": {"axis", "dtype", "keepdims"}, "__call__": {"dtype", "casting"}}
        if name == "matmul":
            allowed["__call__"] |= {"axes", "axis", "keepdims", "order"}
        if extra := set(kwargs) - allowed.get(method, {"axis", "dtype"}):
            raise TypeError(f"Wrong arguments {extra}")
        hosts = [
            _index(value)
            if method in ("at", "reduceat") and place == 1
            else _host(value, f"numpy.{name}'s operand")
            for place, value in enumerate(inputs)
        ]
        if method != "at":  # which changes its first operand
            hosts = [_flushed(host) for host in hosts]
        called = ufunc if method == "__call__" else getattr(ufunc, method)
        if out is not None:
            kwargs["out"] = _host(out, "out")
        if method == "at":
            streams.launched(inputs, inputs[:1])
        result = _flushed(called(*hosts, **kwargs))
        if out is not None:
            out._host[...] = result
        counts.launches += 1
        if method == "at":
            return None
        if out is not None:
            streams.launched((*inputs, out), (out,))
            return out
        return _all_made(result, inputs)

    def __reduce__(self) -> Any:
        raise TypeError("not in these tests")

    # ndarray's methods, with CuPy's parameters.

    def astype(
        self,
        dtype: Any,
        order: str = "K",
        casting: Any = None,
        subok: Any = None,
        copy: bool = True,
    ) -> DeviceArray:
        if casting is not None or subok is not None:
            raise TypeError("casting and subok are not supported yet")
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        with np.errstate(all="ignore"):
            return _launched(self._host.astype(dtype, order=order), (self,))

    def view(self, dtype: Any = None, type: Any = None) -> DeviceArray:
        return _made(self._host.view() if dtype is None else self._host.view(dtype), (self,))

    def copy(self, order: str = "C") -> DeviceArray:
        return _launched(self._host.copy(order), (self,))

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> DeviceArray:
        wanted = shape[0] if len(shape) == 1 else shape
        return _made(np.reshape(self._host, wanted, order, copy=copy), (self,))

    def transpose(self, *axes: Any) -> DeviceArray:
        return _made(self._host.transpose(*axes), (self,))

    def fill(self, value: Any) -> None:
        self[...] = value


def _method(name: str) -> Callable[..., Any]:
    def method(self: DeviceArray, *args: Any, **kwargs: Any) -> Any:
        return call(name, (self, *args), kwargs)

    return method


for _name in (
    "all any argmax argmin argpartition argsort choose clip compress cumprod cumsum diagonal dot "
    "max mean min nonzero prod ptp ravel repeat round searchsorted squeeze std sum swapaxes take "
    "trace var"
).split():
    setattr(DeviceArray, _name, _method(_name))
DeviceArray.flatten = lambda self, order="C": self.copy().reshape(-1, order=order)
DeviceArray.conj = DeviceArray.conjugate = lambda self: np.conjugate(self)


def _operator(ufunc: np.ufunc, reflected: bool) -> Callable[..., Any]:
    def method(self: DeviceArray, other: Any) -> Any:
        if not isinstance(other, (DeviceArray, np.ndarray, *SCALARS)):
            return NotImplemented
        return ufunc(other, self) if reflected else ufunc(self, other)

    return method


def _in_place(ufunc: np.ufunc) -> Callable[..., Any]:
    return lambda self, other: ufunc(self, other, out=self)


OPERATORS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.true_divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "pow": np.power,
    "matmul": np.matmul,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
for _name, _ufunc in OPERATORS.items():
    setattr(DeviceArray, f"__{_name}__", _operator(_ufunc, False))
    setattr(DeviceArray, f"__r{_name}__", _operator(_ufunc, True))
    setattr(DeviceArray, f"__i{_name}__", _in_place(_ufunc))
for _name in ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"):
    _short = {"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"}.get(
        _name, _name[:2] if _name == "equal" else "ne"
    )
    setattr(
        DeviceArray,
        f"__{'eq' if _name == 'equal' else _short}__",
        _operator(getattr(np, _name), False),
    )
for _name, _ufunc in {
    "neg": np.negative,
    "pos": np.positive,
    "abs": np.absolute,
    "invert": np.invert,
}.items():
    setattr(DeviceArray, f"__{_name}__", lambda self, ufunc=_ufunc: ufunc(self))

INTEGERS = ("int32", "uint32", "int64", "uint64")
SCATTER = {
    "add": (*INTEGERS, "float16", "float32", "float64"),
    "subtract": ("int32", "uint32"),
    "maximum": (*INTEGERS, "float32", "float64"),
    "minimum": (*INTEGERS, "float32", "float64"),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), INTEGERS),
}
UFUNC_METHODS: dict[str, Any] = {
    "__call__": surface(),
    "reduce": ("add", "multiply"),
    "accumulate": ("add", "multiply"),
    "reduceat": ("add",),
    "outer": surface(),
    "at": SCATTER,
}


# Functions.

CONVERTS = {"array", "asarray", "asanyarray", "ascontiguousarray"}
INDICES_FROM_HOST = {"take": 1, "delete": 1, "repeat": 1, "linalg.tensorsolve": 9}
NO_SUBOK = {"empty_like", "zeros_like", "ones_like", "full_like"}
FROM_HOST_ALONE = {"arange", "eye", "zeros", "ones", "empty", "full", "identity", "tri", "linspace"}
NO_LISTS = {"gradient", "isin", "interp", "choose"}
FLUSHING = {"where", "clip", "maximum", "minimum", "isclose", "sum", "prod", "cumsum", "mean"}
WIDE = {"where": "f4", "clip": "f4", "round": "f4", "around": "f4", "var": "f8", "std": "f8"}
SHAPED_LIKE = ("empty_like", "zeros_like", "ones_like")
IN_PLACE = {"copyto", "fill_diagonal", "put", "place", "putmask", "put_along_axis"}


def call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """cupy.name(*args, **kwargs): refused where CuPy's parameters do not fit."""
    taken = signature(name)
    if taken is not None:
        given = taken.bind(*args, **kwargs).arguments  # TypeError as from CuPy's own function
        if name in NO_SUBOK and given.get("subok") is not None:
            raise TypeError("subok is not supported yet")
        if name in NO_SUBOK and given.get("shape") == ():
            kwargs = {**kwargs, "shape": args[0].shape}  # sic: CuPy takes () for none given
        if name == "lexsort" and args[0].ndim > 2:
            raise NotImplementedError("Keys with the rank of three or more are not supported")
        if name == "select" and not np.isscalar(given.get("default", 0)):
            raise TypeError("default only accepts scalar values")
    if name in NO_LISTS and any(isinstance(value, list) for value in (*args, *kwargs.values())):
        raise AttributeError("'list' object has no attribute 'dtype'")
    if name == "clip":
        _, *bounds = given = [*args, *kwargs.values()]
        if given[0].dtype.kind == "c":
            raise TypeError("Wrong type of arguments for cupy_clip")
        if given[0].dtype.kind not in "iuf" and any(bound is None for bound in bounds):
            raise TypeError("Unsupported type <class 'NoneType'>")
    kwargs = {key: value for key, value in kwargs.items() if key != "blocking"}
    if name == "ascontiguousarray" and isinstance(args[0], DeviceArray) and args[0].ndim == 0:
        return args[0]
    if name in CONVERTS and isinstance(args[0], np.ndarray):
        _check_dtypes(args[:1])
        counts.uploads += 1
        fresh = DeviceArray(np.array(args[0], *args[1:2], order="C"))
        streams.launched((), (fresh,))
        return fresh
    function = np
    for part in name.split("."):
        function = getattr(function, part)
    place = INDICES_FROM_HOST.get(name)
    hosts = [
        value if number == place and isinstance(value, np.ndarray) else _hosts(value, name)
        for number, value in enumerate(args)
    ]
    options = {key: _hosts(value, name) for key, value in kwargs.items()}
    if name in ("argsort", "sort"):
        hosts, options = hosts[:2], {**options, "kind": "stable"}  # as CuPy's always are
    # A shape and a dtype are read on the host.
    inputs = [] if name in SHAPED_LIKE else [*_arrays((args, tuple(kwargs.values())))]
    if name in IN_PLACE:
        streams.launched(inputs, inputs[:1], peer=name == "copyto")  # between two GPUs, too
        counts.launches += 1
        function(*hosts, **options)
        return None
    with np.errstate(all="ignore"):
        if name in FLUSHING:
            hosts = [_flushed(host) for host in hosts]
        result = function(*hosts, **options)
        if name in WIDE and "bfloat16" in {array.dtype.name for array in inputs}:
            result = np.asarray(result, WIDE[name] if result.dtype.name == "bfloat16" else None)
    out = kwargs.get("out")
    if out is not None:
        streams.launched(inputs, (out,))
        return out
    if name in ("ndim", "size", "shape", "may_share_memory", "shares_memory", "iscomplexobj"):
        return result
    if name in ("count_nonzero", "allclose", "array_equal", "array_equiv"):
        result = np.asarray(result)
    return _all_made(result, inputs)


def _flushed(value: Any) -> Any:
    """The value without float32's subnormal numbers, which CuPy's kernels take for zeros."""
    if isinstance(value, tuple):
        return tuple(map(_flushed, value))
    array = np.asarray(value) if isinstance(value, (np.ndarray, np.generic)) else None
    if array is None or array.dtype.name not in ("float32", "bfloat16"):
        return value
    return np.where(
        abs(array) < np.float32(2.0**-126), np.copysign(np.zeros_like(array), array), array
    )


def _assign(part: DeviceArray, value: Any) -> None:
    part[...] = value


def _check_dtypes(arrays: Any) -> None:
    """CuPy holds arrays in formats of 8 bits, and has no kernels for them."""
    for array in arrays:
        if getattr(array, "dtype", np.dtype(bool)).name.startswith("float8"):
            raise ValueError(f"Unsupported dtype {array.dtype}")


def _arrays(tree: Any) -> Iterator[DeviceArray]:
    if isinstance(tree, (list, tuple)):
        for part in tree:
            yield from _arrays(part)
    elif isinstance(tree, DeviceArray):
        yield tree


def _hosts(value: Any, name: str) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_hosts(part, name) for part in value)
    return _host(value, f"an argument of numpy.{name}")


def _host(value: Any, what: str) -> Any:
    if isinstance(value, DeviceArray):
        return value._host
    if isinstance(value, np.ndarray):
        raise TypeError(f"{what}: Unsupported type <class 'numpy.ndarray'>")
    return value


def _index(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_index(entry) for entry in index)
    if isinstance(index, slice):
        return slice(
            *(
                operator.index(_index(b)) if b is not None else None
                for b in (index.start, index.stop, index.step)
            )
        )
    return index._host if isinstance(index, DeviceArray) else index


def _in_index(index: Any) -> tuple[DeviceArray, ...]:
    return tuple(_arrays(index if isinstance(index, tuple) else (index,)))


def _made(host: Any, inputs: Any) -> DeviceArray:
    """The device's array of a result: a view of an input, or a new one that a kernel made."""
    host = host if type(host) is np.ndarray else np.asarray(host)
    for array in inputs:
        if host.size and np.may_share_memory(host, array._host):
            return DeviceArray(host, array if array.base is None else array.base)
    return _launched(host, inputs)


def _launched(host: np.ndarray, inputs: Any) -> DeviceArray:
    if host.base is not None:
        host = host.copy(order="K")  # NumPy returned a view of what it had just made
    made = DeviceArray(host)
    _check_dtypes((*inputs, made))
    counts.launches += 1
    streams.launched(inputs, (made,))
    return made


def _all_made(result: Any, inputs: Any) -> Any:
    inputs = [value for value in inputs if isinstance(value, DeviceArray)]
    if isinstance(result, (list, tuple)) and not isinstance(result, str):
        parts = [_all_made(part, inputs) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    if isinstance(result, (np.ndarray, np.generic)):
        return _made(result, inputs)
    return result


# The package.


def to_device(values: Any) -> DeviceArray:
    """A copy of NumPy's values; as cupy.asarray."""
    if isinstance(values, DeviceArray):
        return values
    host = np.asarray(values)
    if host.dtype.name.startswith("float8"):
        bits = call("asarray", (np.ascontiguousarray(host).view(np.uint8),), {})
        return bits.view(host.dtype).reshape(host.shape)
    return call("asarray", (host,), {})


def _ran(arguments: np.ndarray) -> None:
    counts.launches += 1
    streams.launched_kernel(arguments)


def _empty(shape: Any, dtype: Any = float, order: str = "C") -> DeviceArray:
    made = DeviceArray(np.empty(shape, dtype))
    _check_dtypes((made,))
    made._host.reshape(-1).view(np.uint8)[:] = 0xA5  # what no thread writes is seen
    streams.allocated(made)
    return made


def _zeros(shape: Any, dtype: Any = float, order: str = "C") -> DeviceArray:
    return _launched(np.zeros(shape, dtype), ())


def _function(name: str) -> Callable[..., Any]:
    ufunc = getattr(np, name, None)
    if isinstance(ufunc, np.ufunc):
        return ufunc  # the arrays take it in hand
    return lambda *args, **kwargs: call(name, args, kwargs)


def package() -> SimpleNamespace:
    """The module that `import cupy` gives."""
    cuda = streams.cuda(NUMBER_OF_GPUS)
    vars(cuda).update(driver(_ran))
    functions: dict[str, Any] = {}
    for name in surface():
        module, _, function = name.rpartition(".")
        functions.setdefault(module, {})[function] = _function(name)
    top = functions.pop("")
    top |= {module: SimpleNamespace(**inner) for module, inner in functions.items()}
    return SimpleNamespace(
        **top
        | {
            "__version__": "stand-in",
            "ndarray": DeviceArray,
            "cuda": cuda,
            "empty": _empty,
            "zeros": _zeros,
            "arange": lambda *args, **kwargs: _launched(np.arange(*args, **kwargs), ()),
            "asarray": to_device,
            "asnumpy": lambda array: array.get(),
        }
    )


@contextmanager
def installed() -> Iterator[Counted]:
    """`import cupy` gives the stand-in meanwhile; yields the counts, from 0."""
    names = ("cupy", "cupy.cuda", "cupy.cuda.nccl")
    before = {name: sys.modules.get(name) for name in names}
    assert not isinstance(before["cupy"], SimpleNamespace), "a stand-in was left behind"
    made = package()
    sys.modules |= dict(zip(names, (made, made.cuda, made.cuda.nccl), strict=True))
    caches = (launch._function, launch._device, launch._checked, compiling.machine_code)

    def forget() -> None:
        """Clear gpusim's caches of CuPy's objects: kernels, streams and communicators."""
        for cached in caches:
            cached.cache_clear()
        pool.clear()
        nccl._communicators.clear()

    forget()
    on_disk = os.environ.get(cache.ENVIRONMENT)
    os.environ[cache.ENVIRONMENT] = ""
    streams.reset()
    for number in range(NUMBER_OF_GPUS):
        launch._checked(number)  # the host waits for this, once in a process
    counts.launches = counts.uploads = counts.downloads = 0
    counts.lacking.clear()
    streams.reset()
    try:
        yield counts
    finally:
        forget()
        del os.environ[cache.ENVIRONMENT]
        if on_disk is not None:
            os.environ[cache.ENVIRONMENT] = on_disk
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
