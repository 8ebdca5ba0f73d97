"""Digests of tensors' bits, at the speed of memory: equal bits have equal digests.

They tell ranks apart; nothing is decided by a digest that could be made equal on purpose.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...tensors import TO_NUMPY
from ..memory import array_of, bits_of
from ..private import is_dtensor, is_wrapper, tensor_inside

__all__ = [
    "address",
    "digest",
    "element",
    "glance",
    "is_constant",
    "largest",
    "local_part",
    "number",
    "tensors_of",
    "values",
]

SMALL, WIDTH = 1 << 14, 512


def address(tensor: Tensor) -> int:
    """The address of a tensor's storage; 0 for those without."""
    part = local_part(tensor)
    return 0 if part is None else part.untyped_storage().data_ptr()


def local_part(tensor: Tensor) -> Tensor | None:
    """The tensor with memory that stands for this one on the rank: itself, or a DTensor's own part.

    None if there is none: of meta tensors, fakes, results that are yet to come, and other wrappers.
    """
    if is_wrapper(type(tensor)):
        if not is_dtensor(tensor):
            return None
        inner = tensor_inside(tensor)
        return None if inner is None else local_part(inner)
    if tensor.layout is not torch.strided or not (tensor.is_cpu or tensor.is_cuda):
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    return tensor


def _bits(tensor: Tensor) -> Any:
    part = local_part(tensor)
    # By the storage, as a tensor on a GPU that the CPU plays says that it is there.
    if part is None or part.untyped_storage().device.type != "cpu":
        return None
    try:
        return bits_of(part, "check")
    except (RuntimeError, TypeError):  # without memory
        return None


def digest(tensor: Tensor) -> str:
    """A digest of the tensor's values in logical order, whatever its shape; "" if it has none."""
    return _digest(_bits(tensor))


def glance(tensor: Tensor) -> tuple[str, list[float]]:
    """A tensor's digest, and two of its elements if it is of floating-point numbers."""
    flat = _floats(tensor)
    if flat is None or not flat.size:
        return digest(tensor), []
    return _digest(flat), [float(flat[0]), float(flat[flat.size // 2])]


def _digest(array: Any) -> str:
    if array is None:
        return ""
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if flat.size <= SMALL:
        return f"{zlib.crc32(flat):08x}"
    # Columns of words are added up, so that most of the bytes are read by additions alone.
    rest = flat.size % (8 * WIDTH)
    words = flat[: flat.size - rest].view(np.uint64).reshape(-1, WIDTH)
    sums: Any = np.add.reduce(words, axis=0)
    return f"{zlib.crc32(flat[flat.size - rest :], zlib.crc32(sums)):08x}"


def is_constant(tensor: Tensor) -> bool:
    """Whether all elements have the same bits. Tensors without values are constant."""
    array = _bits(tensor)
    return array is None or not array.size or bool((array == array.flat[0]).all())


def number(value: Any) -> float | None:
    """The number that a Python number, or a tensor of one element, is; else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if not isinstance(value, Tensor):
        return None
    found = values(value, 1)
    return found[0] if found else None


def values(tensor: Tensor, most: int) -> list[float]:
    """The elements of a tensor; none for one that has more than `most`, or no real numbers."""
    count = tensor.numel()
    if not 0 < count <= most or tensor.is_complex() or local_part(tensor) is not tensor:
        return []
    try:
        array: Any = array_of(tensor, "check")
    except (RuntimeError, TypeError):
        return []
    return [float(each) for each in array.reshape(-1)]


def largest(tensor: Tensor) -> tuple[int, float]:
    """Where the element with the largest magnitude is, and the element; 0, 0.0 if unknown."""
    array = _floats(tensor)
    if array is None or not array.size:
        return 0, 0.0
    place = int(np.abs(array).argmax())
    return place, float(array[place])


def element(tensor: Tensor, place: int) -> float | None:
    """The element at a place in logical order; None if there is none."""
    array = _floats(tensor)
    return None if array is None or place >= array.size else float(array[place])


def _floats(tensor: Tensor) -> Any:
    array, dtype = _bits(tensor), TO_NUMPY.get(tensor.dtype)
    if array is None or dtype is None or not tensor.is_floating_point():
        return None
    return np.ascontiguousarray(array).reshape(-1).view(dtype)


def tensors_of(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors of arguments, and of lists, tuples and dicts in them."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each, depth - 1)
    elif depth and isinstance(value, dict):
        for each in value.values():
            yield from tensors_of(each, depth - 1)
