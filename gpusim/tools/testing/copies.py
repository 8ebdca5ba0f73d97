"""Copies of what a test is given: a process would have its own, so a rank has too."""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np

from gpusim.trees import flatten

__all__ = ["deep_copy", "holds_data"]


def holds_data(value: Any) -> bool:
    """Whether a value is or contains tensors, arrays, modules, optimizers or generators."""
    kinds: tuple[type, ...] = (np.ndarray, np.random.Generator)
    if torch := sys.modules.get("torch"):
        kinds += (
            torch.Tensor,
            torch.Generator,
            torch.nn.Module,
            torch.optim.Optimizer,
            torch.optim.lr_scheduler.LRScheduler,
        )
    return any(isinstance(leaf, kinds) for leaf in flatten(value)[0])


def deep_copy(value: Any, memo: dict[int, Any]) -> tuple[Any, str]:
    """A deep copy, and an empty text; or the reason why there is none."""
    try:
        return copy.deepcopy(value, memo), ""
    except Exception as error:
        return value, str(error) or type(error).__name__
