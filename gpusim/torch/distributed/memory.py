"""The memory of tensors as arrays: NumPy's on the host, CuPy's on a GPU."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...collectives import kernels
from ...collectives.dispatch import OperandKind
from ...cuda.launch import require_cupy
from ...libraries import lacks_kernels, on_device
from ..tensors import TO_NUMPY

__all__ = [
    "array_of",
    "bits_of",
    "device_of",
    "dtype_name",
    "kind_of",
    "move",
    "overlap",
    "overlap_within",
]

_IS_CPU = attrgetter("is_cpu")

Array = np.ndarray[Any, np.dtype[Any]]  # or CuPy's, which has no types


# No lock and no thread of its own: what is here is called by the thread that posts a call, on its
# own tensors, and by the one that computes, on those of all, which wait or have been copied.
def kind_of(tensor: Tensor) -> OperandKind:
    """A tensor's dtype and shape, as messages show them."""
    return OperandKind(dtype_name(tensor.dtype), tuple(tensor.shape))


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name without "torch."."""
    return str(dtype)[6:]


def device_of(what: str, tensors: Sequence[Tensor]) -> str:
    """The device of a call's tensors, which all ranks share; TypeError if they have several."""
    # A loop in C: this is on the way of each call.
    if all(map(_IS_CPU, tensors)):
        return "cpu"
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise TypeError(f"{what}: expected tensors of one device, got {sorted(map(str, devices))}")
    # The same text on all ranks is a term of the call: ranks on different devices are a mismatch.
    return str(devices.pop())


def array_of(tensor: Tensor, what: str) -> Array:
    """A tensor's memory as an array of its dtype.

    It is taken by its address: `tensor.numpy()` would keep the storage from being resized, as FSDP
    does with it, and a dispatch mode of the rank that runs would see the call.

    **Raises**:

    - TypeError: for tensors that are not dense, or neither on the host nor on a GPU, and for dtypes
      that neither NumPy nor ml_dtypes has.
    """
    # Types that neither NumPy nor ml_dtypes adds are refused here; `bits_of` moves any.
    dtype = TO_NUMPY.get(tensor.dtype)
    if dtype is None:
        raise TypeError(f"{what}: expected a dtype that adds, got a tensor of {tensor.dtype}")
    return _view(tensor, dtype, what)


def bits_of(tensor: Tensor, what: str) -> Array:
    """A tensor's memory as unsigned integers, or as raw bytes where none has the width."""
    # Moves must not look at values: a signalling NaN, or a bool that is 2, arrives as it is.
    size = tensor.element_size()
    return _view(tensor, np.dtype(f"u{size}" if size <= 8 else f"V{size}"), what)


def move(pairs: Sequence[tuple[Array, Array]], in_order: bool = False) -> None:
    """Copy the second array of each pair into the first, one pair after another if `in_order`.

    No target may overlap the source of another pair: callers copy such sources before, when a call
    is posted, since then only the tensors of one rank have to be compared.
    """
    # Invariant: targets of one part are disjoint, so that threads may copy them in any order. Where
    # they are not (one tensor several times as output), the caller asks for the order.
    needed = [(x, y) for x, y in pairs if x.size and not _is_same(x, y)]
    # In the thread of the rank that computes, on the memory of all.
    for part in [[pair] for pair in needed] if in_order else [needed]:
        kernels.copy(part)


def overlap(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether a tensor of the first list may share memory with one of the second.

    Tensors are taken as all the memory from their first element to their last one.
    """
    # Never called with a lock held: it is the posting rank's thread, before its part is put down.
    if not tensors or not others:
        return False
    # One sweep over all, as lists of an FSDP step have thousands. It may say yes for strided
    # tensors that interleave, which costs a copy; it never says no where memory is shared.
    spans = sorted([(*_span(x), 0) for x in tensors] + [(*_span(x), 1) for x in others])
    ends = [0, 0]
    for start, end, side in spans:
        # Sorted by their starts: two overlap if one begins before the furthest end of the other
        # list.
        if start < end:
            if ends[1 - side] > start:
                return True
            ends[side] = max(ends[side], end)
    return False


def overlap_within(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors of a list may share memory with each other."""
    spans = sorted(span for span in map(_span, tensors) if span[0] < span[1])
    return any(one[1] > other[0] for one, other in pairwise(spans))


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first byte to behind its last one."""
    if not tensor.numel():
        return 0, 0
    # Strides of torch are never negative: the first element has the lowest address.
    start, width = tensor.data_ptr(), tensor.element_size()
    if tensor.is_contiguous():
        return start, start + width * tensor.numel()
    return start, start + _strides(tensor, width)[1]


def _is_same(target: Any, source: Any) -> bool:
    """Whether both are the same memory of a GPU, whose copies must not overlap."""
    return (
        on_device(target)
        and on_device(source)
        and (target.data.ptr, target.strides) == (source.data.ptr, source.strides)
    )


def _view(tensor: Tensor, dtype: np.dtype[Any], what: str) -> Array:
    on_host = tensor.is_cpu
    if not (on_host or tensor.is_cuda) or tensor.layout != torch.strided:
        raise TypeError(
            f"{what}: expected a dense tensor on the host or on a GPU, got one of layout "
            f"{tensor.layout} on {tensor.device}"
        )
    # Their memory is not their value.
    if tensor.is_conj() or tensor.is_neg():
        raise TypeError(f"{what}: expected a tensor without lazy conjugation; use resolve_conj()")
    shape, width = tuple(tensor.shape), dtype.itemsize
    if not on_host:
        return _view_on_gpu(tensor, dtype, shape, *_strides(tensor, width), what)
    span = width * tensor.numel()
    if not span:
        return np.empty(shape, dtype)
    contiguous = tensor.is_contiguous()
    if not contiguous:
        steps, span = _strides(tensor, width)
    # By the address: no reference to the storage, which torch counts before it resizes it.
    memory: Any = (ctypes.c_char * span).from_address(_address(tensor, what))
    # Invariant: an array keeps its tensor alive, and so the memory, as long as a view of it lives.
    memory.tensor = tensor  # C++ may drop its own reference before other ranks read it
    # Read-only is not marked: torch has no such flag, and callers know what they may write.
    if contiguous:  # named arguments take as long as all the rest
        return np.ndarray(shape, dtype, memory)
    return np.ndarray(shape, dtype, memory, strides=steps)


def _address(tensor: Tensor, what: str) -> int:
    """Where a tensor's memory is.

    **Raises**: TypeError for tensors without any: subclasses that wrap others, fake tensors, and
    those whose storage was freed.
    """
    # A null address must not become an array: NumPy would read there.
    address = tensor.data_ptr()
    if not address:
        raise TypeError(
            f"{what}: expected a tensor with memory of its own, got a {type(tensor).__name__} of "
            f"shape {list(tensor.shape)} without"
        )
    return address


def _strides(tensor: Tensor, width: int) -> tuple[tuple[int, ...], int]:
    """The tensor's strides in bytes, and how many bytes it reaches over."""
    steps = tuple([width * stride for stride in tensor.stride()])
    # Of a tensor with elements: callers do not look at it otherwise.
    last = sum([(size - 1) * step for size, step in zip(tensor.shape, steps, strict=True)])
    return steps, width + last


def _view_on_gpu(
    tensor: Any,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    steps: tuple[int, ...],
    span: int,
    what: str,
) -> Any:
    """The same by CuPy, which holds arrays of some dtypes as views of integers alone."""
    cupy = require_cupy()
    # The array is made on the current device, on no stream: who uses it orders the work by events.
    held = np.dtype(f"u{dtype.itemsize}") if lacks_kernels(dtype) else dtype
    if held.type is np.void:  # raw bytes, which CuPy lacks
        held = dtype = np.dtype(np.complex128)
    if not math.prod(shape):
        return cupy.empty(shape, held).view(dtype)
    number = tensor.device.index or 0
    # CuPy does not free it, and holds the tensor as its owner, as on the host.
    memory = cupy.cuda.UnownedMemory(_address(tensor, what), span, tensor, number)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(shape, held, pointer, strides=steps).view(dtype)
