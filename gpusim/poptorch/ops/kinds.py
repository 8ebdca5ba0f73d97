"""What tensors have to have in common where one stands for another."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["kind"]

OF_IPU = {torch.int64: torch.int32, torch.float64: torch.float32}
"""The dtypes that an IPU has for others."""


def kind(x: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype that an IPU has for a tensor's, and the shape.

    >>> kind(torch.tensor([1, 2]))
    (torch.int32, (2,))
    """
    return OF_IPU.get(x.dtype, x.dtype), tuple(x.shape)
