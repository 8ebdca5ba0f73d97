"""The kernels on CuPy arrays: each launch on the array's device and the current stream.
CuPy is imported by the first call; a kernel is compiled when it is first launched."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import cache, lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpusim.fallback.arguments import NO_MEMBERS
from gpusim.fallback.formats import FormatInfo
from gpusim.fallback.spec import FoldSpec, run_arguments
from gpusim.fallback.wires import WireInfo

from ..libraries import allocate, contiguous
from ..optional import load
from . import folding, ragged, run, scatter, sends
from . import rounding as rounding_on_device
from .cache import once
from .compile import OPTIONS, machine_code, mangled
from .device import THREADS_PER_MULTIPROCESSOR, Array, Device, Kernel, Launch

CONSTANTS = 256  # that a device keeps
CONSTANT_BYTES = 1 << 14  # of one that is kept
PER_THREAD_STREAM = 2  # cudaStreamPerThread, which means another stream in each thread


def require_cupy() -> Any:
    """CuPy, or an ImportError that says what to install."""
    return load("arrays on a GPU need", "cupy")


@once
def _function(kernel: Kernel, number: int) -> Any:
    """A compiled instance, loaded on one device, which is the current one."""
    module = require_cupy().cuda.function.Module()
    module.load(machine_code(kernel, _device(number).architecture))
    function = module.get_function(mangled(kernel))
    if folding.needs_shared(kernel):  # the driver would keep some for the cache, and fewer blocks
        driver = require_cupy().cuda.driver
        carveout = driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        driver.funcSetAttribute(function.ptr, carveout, 100)
    return function


@cache
def _bytes(size: int) -> np.dtype[Any]:
    return np.dtype((np.void, size))


class CupyDevice:
    """`gpusim.cuda.device.Device` for the GPU that is CuPy's current one."""

    def __init__(self, number: int) -> None:
        self._cupy = require_cupy()
        self._number = number
        device = self._cupy.cuda.Device(number)
        self.architecture = f"sm_{device.compute_capability}"
        multiprocessors: int = device.attributes["MultiProcessorCount"]
        self.busy_threads = multiprocessors * THREADS_PER_MULTIPROCESSOR
        self.shared_bytes: int = device.attributes["MaxSharedMemoryPerMultiprocessor"]
        self._constant = lru_cache(CONSTANTS)(self._upload_constant)

    def is_array(self, value: Any) -> bool:
        return isinstance(value, self._cupy.ndarray)

    def pointer(self, array: Array) -> int:
        pointer: int = array.data.ptr
        return pointer

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return allocate(self._cupy.empty, shape, dtype)

    def upload(self, values: NDArray[Any]) -> Array:
        return self._cupy.asarray(values)

    def constant(self, data: bytes) -> Array:
        # Streams share none: they do not wait for each other, and each has memory of its own.
        stream = self._cupy.cuda.get_current_stream().ptr
        if len(data) > CONSTANT_BYTES or stream == PER_THREAD_STREAM:
            return self._upload_constant(stream, data)
        return self._constant(stream, data)

    def _upload_constant(self, stream: int, data: bytes) -> Array:
        return self._cupy.asarray(np.frombuffer(data, np.uint8))

    def download(self, array: Array) -> NDArray[Any]:
        host: NDArray[Any] = self._cupy.asnumpy(array)
        return host

    def contiguous(self, array: Array) -> Array:
        return contiguous(array)

    def run(self, launch: Launch) -> None:
        function = _function(launch.kernel, self._number)
        # A NumPy array of one element is passed by value. Of a struct, CuPy would read the fields'
        # names and types on every launch.
        given = launch.arguments
        arguments = given.reshape(1).view(_bytes(given.itemsize))
        function((launch.grid,), (launch.block,), (arguments,), launch.shared)


@once
def _device(number: int) -> CupyDevice:
    return CupyDevice(number)


@once
def _checked(number: int) -> CupyDevice:
    """The device, once it is known that its kernels keep subnormal numbers."""
    device = _device(number)
    with require_cupy().cuda.Device(number):
        require_subnormals(device, f"GPU {number}")
    return device


def require_subnormals(device: Device, name: str) -> None:
    """Check that a device's kernels add subnormal numbers and read those of 8-bit formats.

    **Raises**: RuntimeError if they flush them to zero: their results would not have the bits of
    the contract.
    """
    codes = np.arange(1, 8, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    tiny = np.full((2, 1), 2.0**-149, np.float32)
    total = folding.fold_members(device, FoldSpec(), device.upload(tiny))
    given = device.upload(codes.view(np.uint8)).view(codes.dtype)
    read = rounding_on_device.round_to(device, given, np.float32)
    exact = device.download(total)[0] == np.float32(2.0**-148)
    if not exact or not np.array_equal(device.download(read), codes.astype(np.float32)):
        raise RuntimeError(
            f"the kernels of {name} flush subnormal numbers to zero, and their results would not "
            f"have the specified bits. NVRTC was given {' '.join(OPTIONS)}: remove what changes "
            "these options, empty the folder of compiled kernels ($GPUSIM_CACHE_DIR, or "
            "~/.cache/gpusim), or move the arrays to the host"
        )


_NOTHING = nullcontext()


def _on(value: Any) -> tuple[Any, CupyDevice]:
    """The context of the device that holds the array (or the list's first), and that device."""
    cupy = sys.modules.get("cupy") or require_cupy()
    array = value if isinstance(value, cupy.ndarray) else value[0]
    if not isinstance(array, cupy.ndarray):
        raise TypeError(f"expected CuPy arrays, got {type(array).__name__}")
    number = array.device.id
    device = _checked(number)
    if cupy.cuda.runtime.getDevice() == number:
        return _NOTHING, device
    return cupy.cuda.Device(number), device


def fold(members: Any, **keywords: Any) -> Array:
    """`fallback.fold` for CuPy arrays: the same keywords, errors and bits."""
    return run_fold(members=members, **run_arguments(**keywords))


def run_fold(spec: FoldSpec, members: Any, **arguments: Any) -> Array:
    """`fallback.run_fold` for CuPy arrays: the same arguments, errors and bits.

    A tree takes at most 65,536 members. ImportError without CuPy.
    """
    if isinstance(members, (list, tuple)) and not members:
        raise ValueError(NO_MEMBERS)
    context, device = _on(members)
    with context:
        return run.run_fold(device, spec, members, **arguments)


def round_to(x: Any, dtype: DTypeLike | FormatInfo | WireInfo, **arguments: Any) -> Array:
    """`fallback.round_to`, or `fallback.wires.round_to_wire`, for CuPy arrays: the same arguments,
    errors and bits."""
    context, device = _on(x)
    with context:
        if isinstance(dtype, WireInfo):
            return sends.round_to_wire(device, x, dtype, **arguments)
        return rounding_on_device.round_to(device, x, dtype, **arguments)


def update_at(ufunc: np.ufunc, x: Any, places: Any, values: Any) -> None:
    """ufunc.at of a flat CuPy array: see `gpusim.cuda.scatter`."""
    context, device = _on(x)
    with context:
        scatter.update_at(device, ufunc, x, places, values)


def ragged_copy(sources: Any, output: Any, segments: NDArray[np.int64]) -> None:
    """`fallback.ragged_copy` for CuPy arrays, whose segments are checked on the device too.

    ValueError, before anything is written, for segments that leave their arrays or overlap. It
    waits for that check.
    """
    if isinstance(sources, (list, tuple)) and not sources:
        return
    context, device = _on(sources)
    with context:
        ragged.ragged_copy(device, sources, output, segments)
