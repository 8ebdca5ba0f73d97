"""Where tensors live: on the CPU, or on a simulated GPU.

The memory of all tensors is the host's. A mark on a tensor's storage says where a real program
would have it: the number of a GPU, or `ON_CPU`. Storages without a mark are of unknown origin:
C++ made them, or a module of torch that is told that there are no GPUs. They count as on the CPU.

A mark is an attribute of the storage's Python object, which lives as long as the storage does.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..private import is_wrapper, tensor_inside

__all__ = [
    "ON_CPU",
    "gpu_of",
    "mark",
    "mark_all",
    "mark_of",
    "mark_of_all",
    "mark_on",
    "storage_of",
]

ON_CPU = -1
_NAME = "gpusim_device"
_PLAIN = (Tensor, torch.nn.Parameter)
# torch's own, as a check hears of a program's calls, and marks are looked up for each operator.
_storage_of_plain = Tensor.untyped_storage


@functools.lru_cache(maxsize=256)
def _is_wrapper(kind: type) -> bool:
    return is_wrapper(kind)


def storage_of(tensor: Tensor) -> Any:
    """The storage that a tensor's mark is on; None for tensors without memory of their own."""
    while type(tensor) not in _PLAIN and _is_wrapper(type(tensor)):
        inside = tensor_inside(tensor)
        if inside is None:
            return None
        tensor = inside
    try:
        return _storage_of_plain(tensor)
    except (NotImplementedError, RuntimeError):  # sparse tensors, and those of torch.func
        return None


def mark_of(tensor: Tensor) -> int | None:
    """The number of a tensor's GPU, `ON_CPU`, or None where it is not known."""
    return mark_on(storage_of(tensor))


def mark_on(storage: Any) -> int | None:
    """The mark of a storage."""
    return getattr(storage, _NAME, None)


def gpu_of(tensor: Tensor) -> int | None:
    """The number of a tensor's GPU; None for tensors elsewhere."""
    index = mark_of(tensor)
    return None if index == ON_CPU else index


def mark(tensor: Tensor, index: int) -> None:
    """Note where a tensor lives."""
    storage = storage_of(tensor)
    if storage is not None and storage.device.type == "cpu":
        setattr(storage, _NAME, index)


def mark_of_all(values: Any) -> int | None:
    """The mark of a call's arguments: a GPU's if one has it, else `ON_CPU` if one has that."""
    result = None
    for value in values:
        if isinstance(value, Tensor):
            index = getattr(storage_of(value), _NAME, None)
        elif type(value) in (list, tuple):
            index = mark_of_all(value)
        else:
            continue
        if index is not None:
            if index != ON_CPU:
                return index
            result = index
    return result


def mark_all(result: Any, index: int) -> None:
    """Mark the tensors that a call returned; those on the CPU become no GPU's by it."""
    if isinstance(result, Tensor):
        storage = storage_of(result)
        if storage is None:
            return
        before = getattr(storage, _NAME, None)
        if before is None and storage.device.type == "cpu":
            setattr(storage, _NAME, index)
    elif isinstance(result, list | tuple):
        for each in result:
            if isinstance(each, torch.Tensor | list | tuple):
                mark_all(each, index)
