"""Launches of kernels, and the interface of the devices that run them.
CuPy's GPU is one such device (launch.py); the tests' host build is another."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from numpy.typing import DTypeLike, NDArray

#: So many keep a GPU busy: each has 128 bytes of loads under way.
THREADS_PER_MULTIPROCESSOR = 512

#: The shared memory of a multiprocessor of an H100.
SHARED_PER_MULTIPROCESSOR = 228 * 1024

Array = Any  # an array of the device: shape, strides and dtype as NumPy's


class Kernel(NamedTuple):
    """An instance of a template: `name` is a C++ expression in the source file."""

    source: str
    name: str


class Launch(NamedTuple):
    """One kernel launch; `arguments` is the struct that the kernel takes, an array of one."""

    kernel: Kernel
    arguments: NDArray[Any]
    threads: int
    block: int = 256
    shared: int = 0  # bytes for a block

    @property
    def grid(self) -> int:
        return -(-self.threads // self.block)


class Device(Protocol):
    """A machine with memory of its own that runs launches, in order."""

    #: How many threads keep it busy: THREADS_PER_MULTIPROCESSOR on each of its multiprocessors.
    busy_threads: int

    #: The shared memory of a multiprocessor, in bytes.
    shared_bytes: int

    def is_array(self, value: Any) -> bool: ...

    def pointer(self, array: Array) -> int: ...

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array: ...

    def upload(self, values: NDArray[Any]) -> Array: ...

    def constant(self, data: bytes) -> Array:
        """An array of these bytes, which callers share and never write."""

    def download(self, array: Array) -> NDArray[Any]: ...

    def contiguous(self, array: Array) -> Array: ...

    def run(self, launch: Launch) -> None: ...
