"""The memory of tensors as spans of addresses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Span", "is_dense", "meet", "spans_of"]

Span = tuple[int, int]

RUNS = 2048
"""The most pieces of a tensor with gaps that are told apart; of more, the whole is one span."""


def spans_of(tensors: Sequence[Tensor]) -> list[Span]:
    """The addresses of the tensors' memory, each with its end; none for those without memory."""
    found: list[Span] = []
    for each in tensors:
        if each.layout is not torch.strided or not each.numel():
            continue
        try:
            start = each.data_ptr()
        except RuntimeError:  # of a wrapper, or a fake
            continue
        if start:
            found += _spans(start, each)
    return found


def _spans(start: int, tensor: Tensor) -> list[Span]:
    width = tensor.element_size()
    if tensor.is_contiguous():
        return [(start, start + width * tensor.numel())]
    if tensor.is_nested:  # which has no strides
        storage = tensor.untyped_storage()
        return [(storage.data_ptr(), storage.data_ptr() + storage.nbytes())]
    block = 1
    outer: list[tuple[int, int]] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if stride == block and not outer:
            block *= size
        else:
            outer.append((stride, size))
    runs = 1
    for _, size in outer:
        runs *= size
    if runs > RUNS:
        reach = block + sum((size - 1) * stride for stride, size in outer)
        return [(start, start + width * reach)]
    steps = [range(0, size * stride, stride) for stride, size in outer]
    offsets = map(sum, itertools.product(*steps))
    return [(start + width * at, start + width * (at + block)) for at in offsets]


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill its memory, in any order."""
    if tensor.is_contiguous():
        return True
    if tensor.is_nested:
        return False
    block = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != block:
            return False
        block *= size
    return True


def meet(some: Sequence[Span], others: Sequence[Span]) -> bool:
    """Whether a span of the first list shares an address with one of the second.

    >>> meet([(0, 4), (8, 12)], [(4, 8)]), meet([(0, 4)], [(3, 5)])
    (False, True)
    """
    if len(some) * len(others) <= 64:
        return any(a[0] < b[1] and b[0] < a[1] for a in some for b in others)
    ends = [0, 0]
    for start, end, side in sorted([(*a, 0) for a in some] + [(*b, 1) for b in others]):
        if ends[1 - side] > start:
            return True
        ends[side] = max(ends[side], end)
    return False
