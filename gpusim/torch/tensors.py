"""Tensors as arrays and arrays as tensors, in the same memory: NumPy's on the host, CuPy's on a
GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ..collectives import kernels
from ..libraries import on_device

__all__ = ["as_array", "as_tensor", "dtype_of", "torch_dtype", "on_stream_of"]

#: torch's dtypes that NumPy knows by the same bits.
NATIVE: dict[torch.dtype, np.dtype[Any]] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}

#: Those that ml_dtypes adds: they cross as unsigned integers of as many bits.
EXTENDED: dict[torch.dtype, np.dtype[Any]] = {
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e4m3fnuz: np.dtype(ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
    torch.float8_e5m2fnuz: np.dtype(ml_dtypes.float8_e5m2fnuz),
}

TO_NUMPY = NATIVE | EXTENDED
TO_TORCH = {dtype: of_torch for of_torch, dtype in TO_NUMPY.items()}

BITS = {1: (torch.uint8, np.dtype(np.uint8)), 2: (torch.uint16, np.dtype(np.uint16))}
"""Unsigned integers by their size in bytes, in both libraries."""


def dtype_of(tensor: torch.Tensor, what: str = "tensor") -> np.dtype[Any]:
    """The dtype of NumPy or ml_dtypes that the tensor's memory has.

    **Raises**:

    - TypeError: for dtypes that neither has, and tensors that no array can share memory with.
    """
    found = TO_NUMPY.get(tensor.dtype)
    if found is None:
        raise TypeError(
            f"{what} is a tensor of {tensor.dtype}, which NumPy and ml_dtypes lack; convert it "
            f"first, to one of {', '.join(str(dtype)[6:] for dtype in TO_NUMPY)}"
        )
    if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(
            f"{what} is a tensor of layout {tensor.layout} on {tensor.device}; a strided one on "
            "the host or on a GPU was expected"
        )
    return found


def torch_dtype(dtype: np.dtype[Any], what: str = "array") -> torch.dtype:
    """torch's dtype with the bits of NumPy's; TypeError where it has none."""
    found = TO_TORCH.get(np.dtype(dtype))
    if found is None:
        raise TypeError(f"{what} is an array of {dtype}, which torch lacks")
    return found


def as_array(tensor: torch.Tensor, what: str = "tensor") -> Any:
    """The tensor's memory as an array: NumPy's on the host, CuPy's on a GPU; nothing is copied.

    **Arguments**:

    - `tensor`: of any shape and strides, expanded ones too, and whether or not it requires grad
      (the array knows nothing of that). bfloat16 and float8 become ml_dtypes'.
    - `what`: what the error calls it.

    **Raises**:

    - TypeError: for a dtype that neither NumPy nor ml_dtypes has, and for tensors that are neither
      on the host nor on a GPU, or not strided.

    >>> import torch, gpusim.torch
    >>> x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    >>> gpusim.torch.as_array(x)
    array([1, 1, 1], dtype=bfloat16)
    """
    dtype = dtype_of(tensor, what)
    if tensor.dtype in NATIVE and tensor.device.type == "cpu":
        found: np.ndarray[Any, Any] = tensor.numpy(force=True)
        return found
    plain = tensor.detach().resolve_conj().resolve_neg()
    bits = None
    if tensor.dtype in EXTENDED:
        bits, _ = BITS[dtype.itemsize]
        plain = plain.view(bits)
    array = plain.numpy() if tensor.device.type == "cpu" else _cupy().from_dlpack(plain)
    return array if bits is None else array.view(dtype)


def as_tensor(array: Any, *, copy: bool = False) -> torch.Tensor:
    """The array's memory as a tensor; copied if asked for, or if torch cannot have it as it is.

    **Arguments**:

    - `array`: NumPy's or CuPy's, of any dtype that `as_array` gives.
    - `copy`: True for memory of its own. Read-only arrays and those with negative strides are
      always copied, since torch knows neither.

    **Raises**:

    - TypeError: for a dtype that torch lacks.

    >>> import numpy as np, gpusim.torch
    >>> gpusim.torch.as_tensor(np.arange(3.0))
    tensor([0., 1., 2.], dtype=torch.float64)
    """
    if isinstance(array, np.generic):
        array = np.asarray(array)
    wanted = torch_dtype(array.dtype)
    if copy or not _fits(array):
        fresh = kernels.empty(array, array.shape)
        kernels.copy([(fresh, array)])
        array = fresh
    if wanted in EXTENDED:
        array = array.view(BITS[array.dtype.itemsize][1])
    found = torch.from_dlpack(array) if on_device(array) else torch.from_numpy(array)
    return found.view(wanted) if wanted in EXTENDED else found


def _fits(array: Any) -> bool:
    """Whether torch can have the array's memory as it is."""
    writeable = on_device(array) or array.flags.writeable
    if not writeable:
        return False
    size = array.dtype.itemsize
    for stride in array.strides:
        if stride < 0 or stride % size:
            return False
    return True


# On a GPU: torch's current stream, and torch's allocator.


def _cupy() -> Any:
    from ..cuda.launch import require_cupy

    return require_cupy()


def _allocate(size: int, device: int) -> int:
    stream = torch.cuda.current_stream(device)
    address: int = torch.cuda.caching_allocator_alloc(size, device, stream)
    return address


def _free(address: int, device: int) -> None:
    torch.cuda.caching_allocator_delete(address)


def on_stream_of(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """CuPy's work inside runs where torch's would: the tensors' GPU, torch's current stream there,
    memory from torch's allocator. Nothing for tensors on the host."""
    for x in tensors:
        if x.is_cuda:
            return _on_stream_of(x)
    return nullcontext()


@contextmanager
def _on_stream_of(tensor: torch.Tensor) -> Iterator[None]:
    cupy = _cupy()
    stream = torch.cuda.current_stream(tensor.device)
    allocator = cupy.cuda.PythonFunctionAllocator(_allocate, _free)
    with ExitStack() as entered:
        entered.enter_context(cupy.cuda.Device(tensor.device.index))
        entered.enter_context(cupy.cuda.ExternalStream(stream.cuda_stream))
        entered.enter_context(cupy.cuda.using_allocator(allocator.malloc))
        yield
