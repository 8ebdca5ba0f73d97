"""Automatic loss scaling: the largest power of two times the loss scaling with which gradients fit.

After each update the gradients' absolute values are counted in two bins. One value in ten million
beyond the edge halves the factor; otherwise it doubles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["adjusted"]

EDGE = 0.0625  # of the largest finite value of the gradient's type: four doublings below it
ABOVE = 1e-7  # of all values
LARGEST = 2.0**15  # of a loss scaling: the largest power of two that float16 holds


def adjusted(gradients: Sequence[Tensor], factor: float, loss_scaling: float) -> tuple[float, bool]:
    """The factor for the next step, and whether these gradients can be used.

    **Arguments**

    - `gradients`: of the scaled loss, of any floating-point types.
    - `factor`: what they were scaled by, times `loss_scaling`; the product grows to 32768 at most.

    Gradients with infinities or NaNs cannot be used: they did not fit.

    >>> import torch
    >>> adjusted([torch.tensor([3.0], dtype=torch.float16)], 4.0, 1.0)
    (8.0, True)
    >>> adjusted([torch.tensor([50000.0, 1.0], dtype=torch.float16)], 4.0, 1.0)
    (2.0, True)
    """
    if not gradients:
        return factor, True
    largest = [float(norm) for norm in torch._foreach_norm(list(gradients), math.inf)]
    beyond = 0
    for gradient, most in zip(gradients, largest, strict=True):
        edge = EDGE * torch.finfo(gradient.dtype).max
        if not most <= edge:  # also where there is a NaN
            beyond += gradient.numel() - int((gradient.abs() <= edge).sum())
    usable = all(math.isfinite(most) for most in largest)
    if beyond > ABOVE * sum(gradient.numel() for gradient in gradients):
        return factor / 2, usable
    return max(factor, min(factor * 2, LARGEST / abs(loss_scaling))), usable
