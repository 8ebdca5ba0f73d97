"""The memory of tensors as NumPy arrays."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...collectives import kernels
from ...collectives.dispatch import OperandKind
from ..tensors import TO_NUMPY

__all__ = ["array_of", "bits_of", "flat_bits", "kind_of", "move"]

Array = np.ndarray[Any, np.dtype[Any]]


def kind_of(tensor: Tensor) -> OperandKind:
    """A tensor's dtype and shape, as messages show them."""
    return OperandKind(str(tensor.dtype)[6:], tuple(tensor.shape))


def array_of(tensor: Tensor, what: str) -> Array:
    """A tensor's memory as an array of its dtype.

    It is taken by its address: `tensor.numpy()` would keep the storage from being resized, as FSDP
    does with it, and a dispatch mode of the rank that runs would see the call.

    **Raises**:

    - TypeError: for tensors that are not dense and on the host, and for dtypes that neither NumPy
      nor ml_dtypes has.
    """
    dtype = TO_NUMPY.get(tensor.dtype)
    if dtype is None:
        raise TypeError(f"{what}: expected a dtype that adds, got a tensor of {tensor.dtype}")
    return _view(tensor, dtype, what)


def bits_of(tensor: Tensor, what: str) -> Array:
    """A tensor's memory as unsigned integers, or as raw bytes where none has the width."""
    size = tensor.element_size()
    return _view(tensor, np.dtype(f"u{size}" if size <= 8 else f"V{size}"), what)


def flat_bits(tensor: Tensor, what: str) -> Array:
    """The same in one dimension; TypeError for a tensor that is not contiguous."""
    if not tensor.is_contiguous():
        raise TypeError(f"{what}: expected a contiguous tensor, got strides {tensor.stride()}")
    return bits_of(tensor, what).reshape(-1)


def move(pairs: Sequence[tuple[Array, Array]]) -> None:
    """Copy the second array of each pair into the first."""
    kernels.copy([(target, source) for target, source in pairs if target.size])


def _view(tensor: Tensor, dtype: np.dtype[Any], what: str) -> Array:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise TypeError(
            f"{what}: expected a dense tensor on the host, got one of layout {tensor.layout} on "
            f"{tensor.device}; gpusim.torch.distributed does not reduce on a GPU yet"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise TypeError(f"{what}: expected a tensor without lazy conjugation; use resolve_conj()")
    shape, strides = tuple(tensor.shape), tensor.stride()
    if not math.prod(shape):
        return np.empty(shape, dtype)
    width = dtype.itemsize
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory: Any = (ctypes.c_char * (span * width)).from_address(tensor.data_ptr())
    memory.tensor = tensor  # C++ may drop its own reference before other ranks read it
    return np.ndarray(shape, dtype, memory, strides=tuple(width * stride for stride in strides))
