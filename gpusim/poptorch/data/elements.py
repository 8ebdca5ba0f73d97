"""Elements: structures of tensors that a dataset yields, checked, joined and cut anew.
An outline is an element whose tensors hold no data: what another process needs to make it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gpusim.poptorch.replicas.structures import flatten

__all__ = ["Element", "combined", "element", "rebatched"]

NO_TENSOR = (
    "Tensor at index {} is not a torch tensor ({}). AsynchronousDataAccessor expects data to be "
    "organised as a flat 1D container of tensors."
)


@dataclass(frozen=True)
class Element:
    """What the dataset yielded, as a structure and the tensors in it.

    - `like`: the structure; its tensors serve as examples only.
    - `tensors`: for each of them, the pieces that lie one after the other along dimension 0.
    """

    like: Any
    tensors: list[list[Tensor]]

    def shapes(self) -> list[tuple[int, ...]]:
        """What shape each tensor has as a whole."""
        return [shape(pieces) for pieces in self.tensors]

    def outline(self) -> Any:
        """The structure with tensors that have shape and dtype, and no data."""
        empty = (
            torch.empty(shape(pieces), dtype=pieces[0].dtype, device="meta")
            for pieces in self.tensors
        )
        return flatten(self.like)[1](empty)

    def value(self) -> Any:
        """The structure with whole tensors."""
        whole = (pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in self.tensors)
        return flatten(self.like)[1](whole)


def shape(pieces: list[Tensor]) -> tuple[int, ...]:
    if len(pieces) == 1:
        return tuple(pieces[0].shape)
    return (sum(len(piece) for piece in pieces), *pieces[0].shape[1:])


def element(value: Any) -> Element:
    """AssertionError for what is no tensor and has none in it; TypeError for tensors that cannot
    lie in shared memory.

    >>> element((torch.zeros(2), {"x": torch.ones(3)})).shapes()
    [(2,), (3,)]
    >>> element([torch.zeros(2), "label"])
    Traceback (most recent call last):
    ...
    AssertionError: Tensor at index 1 is not a torch tensor (<class 'str'>). Asynchronous...
    """
    for index, item in enumerate(value if isinstance(value, (list, tuple)) else [value]):
        tensors = flatten(item)[0]
        assert tensors, NO_TENSOR.format(index, type(item))
        for tensor in tensors:
            if tensor.layout is not torch.strided or tensor.device.type != "cpu":
                raise TypeError(
                    f"Tensor at index {index} is {tensor.layout} on {tensor.device}: "
                    "AsynchronousDataAccessor expects dense tensors on the CPU"
                )
    return Element(value, [[tensor.detach()] for tensor in flatten(value)[0]])


def joined(elements: list[Element]) -> Element:
    """Several as one, along dimension 0; ValueError if they do not fit together."""
    first = elements[0]
    for other in elements[1:]:
        for one, two in zip(first.tensors, other.tensors, strict=True):
            if one[0].dtype != two[0].dtype or one[0].shape[1:] != two[0].shape[1:]:
                raise ValueError(
                    f"a tensor {tuple(one[0].shape)} of {one[0].dtype} cannot be batched with one "
                    f"{tuple(two[0].shape)} of {two[0].dtype}"
                )
    pieces = zip(*(other.tensors for other in elements), strict=True)
    return Element(first.like, [[piece for part in parts for piece in part] for parts in pieces])


def combined(values: Iterable[Any], number: int, drop_last: bool) -> Iterator[Any]:
    """So many batches at a time as one; at the end fewer, or none with `drop_last`.

    >>> batches = [{"x": torch.tensor([i])} for i in range(3)]
    >>> list(combined(batches, 2, drop_last=False))
    [{'x': tensor([0, 1])}, {'x': tensor([2])}]
    """
    remaining = iter(values)
    while some := [element(value) for value in islice(remaining, number)]:
        if len(some) < number and drop_last:
            return
        yield joined(some).value()


def rebatched(
    values: Iterable[Any], size: int, drop_last: bool, samples: bool
) -> Iterator[Element]:
    """Batches of `size`, made of batches of any sizes; at the end a smaller one, or none.

    **Arguments**

    - `samples`: the values are no batches: each is one entry of a batch.

    ValueError for tensors that have no dimension 0, or one of another length than their neighbours.

    >>> batches = [torch.arange(0, 3), torch.arange(3, 6), torch.arange(6, 7)]
    >>> [made.value().tolist() for made in rebatched(batches, 2, drop_last=False, samples=False)]
    [[0, 1], [2, 3], [4, 5], [6]]
    """
    waiting: list[Element] = []
    missing = size
    for value in values:
        rest = batch_of_one(element(value)) if samples else element(value)
        while (length := batch_size(rest)) >= missing:
            yield joined([*waiting, part(rest, 0, missing)])
            rest, waiting, missing = part(rest, missing, length), [], size
        if length:
            waiting.append(rest)
            missing -= length
    if waiting and not drop_last:
        yield joined(waiting)


def batch_of_one(one: Element) -> Element:
    return Element(one.like, [[piece[None] for piece in pieces] for pieces in one.tensors])


def batch_size(one: Element) -> int:
    shapes = one.shapes()
    sizes = {shape[0] if shape else None for shape in shapes}
    size = sizes.pop()
    if sizes or size is None:
        raise ValueError(f"tensors {shapes} are no batch: dimension 0 is to count its entries")
    return size


def part(one: Element, begin: int, end: int) -> Element:
    return Element(one.like, [[piece[begin:end] for piece in pieces] for pieces in one.tensors])
