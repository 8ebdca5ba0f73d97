"""Elements, the structures of tensors that a dataset yields: checked, joined and rebatched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from gpusim.poptorch.replicas.structures import flatten, flatten_like

__all__ = ["checked", "combined", "rebatched"]

NO_TENSOR = (
    "Tensor at index {} is not a torch tensor ({}). AsynchronousDataAccessor expects data to be "
    "organised as a flat 1D container of tensors."
)


def checked(element: Any) -> Any:
    """Return the element if it can go to another process.

    **Raises**:

    - AssertionError: if it, or an item of it, is not a tensor and contains none.
    - TypeError: if a tensor cannot lie in shared memory.

    >>> checked([torch.zeros(2), "label"])
    Traceback (most recent call last):
    ...
    AssertionError: Tensor at index 1 is not a torch tensor (<class 'str'>). Asynchronous...
    """
    for index, item in enumerate(element if isinstance(element, (list, tuple)) else [element]):
        tensors = flatten(item)[0]
        assert tensors, NO_TENSOR.format(index, type(item))
        for tensor in tensors:
            if tensor.layout is not torch.strided or tensor.device.type != "cpu":
                raise TypeError(
                    f"Tensor at index {index} is {tensor.layout} on {tensor.device}: "
                    "AsynchronousDataAccessor expects dense tensors on the CPU"
                )
    return element


def joined(batches: list[Any]) -> Any:
    """Join batches along dimension 0. Different dtypes are promoted, as by torch.cat.

    **Raises**:

    - ValueError: if structures or the other dimensions differ.
    """
    if len(batches) == 1:
        return batches[0]
    found, rebuild = flatten(batches[0])
    others = [flatten_like(batches[0], batch) for batch in batches[1:]]
    columns = list(zip(found, *others, strict=True))
    for first, *rest in columns:
        for other in rest:
            if first.shape[1:] != other.shape[1:]:
                raise ValueError(
                    f"a tensor {tuple(first.shape)} cannot be batched with one {tuple(other.shape)}"
                )
    return rebuild(torch.cat([piece.detach() for piece in column]) for column in columns)


def combined(values: Iterable[Any], number: int, drop_last: bool) -> Iterator[Any]:
    """Join `number` batches at a time. The last are fewer, or are dropped with `drop_last`.

    >>> batches = [{"x": torch.tensor([i])} for i in range(3)]
    >>> list(combined(batches, 2, drop_last=False))
    [{'x': tensor([0, 1])}, {'x': tensor([2])}]
    """
    remaining = map(checked, values)
    while batches := list(islice(remaining, number)):
        if len(batches) < number and drop_last:
            return
        yield joined(batches)


def rebatched(values: Iterable[Any], size: int, drop_last: bool, samples: bool) -> Iterator[Any]:
    """Cut batches of any sizes into batches of `size`. The last is smaller, or is dropped.

    **Arguments**:

    - `samples`: each value is one entry of a batch instead of a batch.

    **Raises**:

    - ValueError: if a tensor lacks dimension 0, or its length differs from its neighbours'.

    >>> batches = [torch.arange(0, 3), torch.arange(3, 6), torch.arange(6, 7)]
    >>> [made.tolist() for made in rebatched(batches, 2, drop_last=False, samples=False)]
    [[0, 1], [2, 3], [4, 5], [6]]
    """
    waiting: list[Any] = []
    missing = size
    for value in map(checked, values):
        batch = each(value, itemgetter(None)) if samples else value
        begin, length = 0, length_of(batch)
        while begin < length:
            end = min(begin + missing, length)
            waiting.append(each(batch, itemgetter(slice(begin, end))))
            missing -= end - begin
            begin = end
            if not missing:
                yield joined(waiting)
                waiting, missing = [], size
    if waiting and not drop_last:
        yield joined(waiting)


def each(element: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to the tensors of an element."""
    tensors, rebuild = flatten(element)
    return rebuild(map(function, tensors))


def length_of(batch: Any) -> int:
    """The number of entries in a batch."""
    shapes = [tuple(tensor.shape) for tensor in flatten(batch)[0]]
    lengths = {shape[0] if shape else None for shape in shapes}
    length = lengths.pop()
    if lengths or length is None:
        raise ValueError(f"tensors {shapes} are not a batch: dimension 0 must count its entries")
    return length
