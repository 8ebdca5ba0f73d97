"""Comparison of a model's results with expected ones."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["allclose"]

TOLERANCES = {torch.float16: (1e-3, 1e-3), torch.bfloat16: (1.6e-2, 1e-3)}
DEFAULT = (1e-5, 1e-8)  # torch.allclose's


def allclose(ref: Any, other: Any) -> bool:
    """Whether two tensors, or tuples, lists or dicts of tensors, are equal up to rounding.

    Tensors are compared in the coarser of their two dtypes, which may differ, with torch.allclose's
    tolerances, or for 16-bit types with 1e-3 (bfloat16: 1.6e-2). NaNs are equal. Other values have
    to be equal. Structures and shapes that differ are not close.

    >>> allclose((torch.ones(2), {"x": torch.tensor([0.5])}), (torch.ones(2), {"x": [0.5]}))
    False
    >>> allclose(torch.tensor([1.0]), torch.tensor([1.0 + 1e-6]))
    True
    """
    if isinstance(ref, torch.Tensor) and isinstance(other, torch.Tensor):
        return tensors_close(ref, other)
    if isinstance(ref, (tuple, list)) and isinstance(other, (tuple, list)):
        same = type(ref) is type(other) and len(ref) == len(other)
        return same and all(map(allclose, ref, other))
    if isinstance(ref, dict) and isinstance(other, dict):
        return ref.keys() == other.keys() and all(allclose(ref[key], other[key]) for key in ref)
    return type(ref) is type(other) and bool(ref == other)


def tensors_close(ref: torch.Tensor, other: torch.Tensor) -> bool:
    if ref.shape != other.shape:
        return False
    rtol, atol = max(TOLERANCES.get(one.dtype, DEFAULT) for one in (ref, other))
    left, right = (one.detach().cpu().double() for one in (ref, other))
    return torch.allclose(left, right, rtol=rtol, atol=atol, equal_nan=True)
