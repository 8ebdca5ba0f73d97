"""Inputs that are made on the device instead of copied there, for timing a model alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["synthetic"]


def synthetic(tensor: Tensor, seed: int) -> Tensor:
    """A tensor of the same shape and dtype: normally distributed, or zeros if it holds no floats.

    >>> synthetic(torch.tensor([3, 4]), 0)
    tensor([0, 0])
    """
    if not tensor.is_floating_point():
        return torch.zeros_like(tensor)
    drawn = np.random.Generator(np.random.Philox(seed)).standard_normal(tensor.numel(), np.float32)
    return torch.from_numpy(drawn).reshape(tensor.shape).to(tensor.dtype).to(tensor.device)
