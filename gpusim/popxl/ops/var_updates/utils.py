"""Factors of updates: numbers that are part of the op, or tensors."""

from __future__ import annotations

from typing import Any

from ...tensor import Tensor

__all__ = ["handle_optimizer_value"]


def handle_optimizer_value(f: Any, ins: dict[int, Tensor], index: int) -> float | int:
    """What an op's attribute says of a factor: the number itself, as a float; or, for a tensor,
    `index`, the input that it becomes in `ins`.

    TypeError for what is neither a number nor a tensor; ValueError for a tensor of more elements.
    """
    if not isinstance(f, Tensor):
        return float(f)
    if f.nelms != 1:
        raise ValueError(f"A factor must have one element, got {f}")
    ins[index] = f
    return index
