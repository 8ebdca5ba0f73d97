"""The kernels on CuPy arrays: each launch on the array's device and the current stream.
CuPy is imported by the first call, and compiles each kernel when it is first launched."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fallback.arguments import NO_MEMBERS
from fallback.formats import SUB_32_BIT, FormatInfo
from fallback.spec import FoldSpec, run_arguments

from ..optional import load
from . import folding, ragged
from . import rounding as rounding_on_device
from .compile import NVRTC_OPTIONS, SOURCES, mangled, translation_unit
from .device import THREADS_PER_MULTIPROCESSOR, Array, Kernel, Launch


def require_cupy() -> Any:
    """CuPy, or an ImportError that says what to install."""
    return load("arrays on a GPU need", "cupy")


@cache
def _function(kernel: Kernel, device: int) -> Any:
    """A compiled instance, for one device: they may differ in architecture.

    It is instantiated in the source and found by its mangled name, since CuPy keeps on disk only
    what it compiles without name expressions.
    """
    cupy = require_cupy()
    module = cupy.RawModule(
        code=translation_unit([kernel]) + _fingerprint(),
        options=(*NVRTC_OPTIONS, f"-I{SOURCES}"),
    )
    return module.get_function(mangled(kernel))


@cache
def _fingerprint() -> str:
    """The sources' hash as a comment: CuPy's cache on disk does not see into included files."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.cu*")):
        digest.update(path.read_bytes())
    return f"// {digest.hexdigest()}\n"


class CupyDevice:
    """`gpusim.cuda.device.Device` for the GPU that is CuPy's current one."""

    def __init__(self, number: int) -> None:
        self._cupy = require_cupy()
        self._number = number
        attributes = self._cupy.cuda.Device(number).attributes
        self.busy_threads = attributes["MultiProcessorCount"] * THREADS_PER_MULTIPROCESSOR

    def is_array(self, value: Any) -> bool:
        return isinstance(value, self._cupy.ndarray)

    def pointer(self, array: Array) -> int:
        pointer: int = array.data.ptr
        return pointer

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return self._cupy.empty(shape, dtype)

    def upload(self, values: NDArray[Any]) -> Array:
        return self._cupy.asarray(values)

    def constant(self, data: bytes) -> Array:
        return self.upload(np.frombuffer(data, np.uint8))

    def download(self, array: Array) -> NDArray[Any]:
        host: NDArray[Any] = self._cupy.asnumpy(array)
        return host

    def contiguous(self, array: Array) -> Array:
        # CuPy holds arrays of 8-bit formats, but has no kernels for them: their bits are copied.
        bits = array.view(f"u{array.dtype.itemsize}") if array.dtype in SUB_32_BIT else array
        return self._cupy.ascontiguousarray(bits).view(array.dtype)

    def run(self, launch: Launch) -> None:
        function = _function(launch.kernel, self._number)
        # A NumPy array of one element is passed by value.
        arguments = (launch.arguments.reshape(1),)
        function((launch.grid,), (launch.block,), arguments, shared_mem=launch.shared)


@cache
def _device(number: int) -> CupyDevice:
    return CupyDevice(number)


def _on(value: Any) -> tuple[Any, CupyDevice]:
    """The context of the device that holds the array (or the list's first), and that device."""
    cupy = require_cupy()
    array = value if isinstance(value, cupy.ndarray) else value[0]
    if not isinstance(array, cupy.ndarray):
        raise TypeError(f"expected CuPy arrays, got {type(array).__name__}")
    number = int(array.device.id)
    context = cupy.cuda.Device(number)
    with context:
        return context, _device(number)


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
        return folding.run_fold(device, spec, members, **arguments)


def round_to(x: Any, dtype: DTypeLike | FormatInfo, **arguments: Any) -> Array:
    """`fallback.round_to` for CuPy arrays: the same arguments, errors and bits."""
    context, device = _on(x)
    with context:
        return rounding_on_device.round_to(device, x, dtype, **arguments)


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
