"""Parameters that are updated together, as lists of float32 tensors for torch's foreach operations.

A rule changes the tensors in place; `store` writes an accumulator in the type that it is kept in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Batch", "Rule", "Slot"]


@dataclass(frozen=True)
class Slot:
    """An accumulator that a rule keeps for each parameter.

    - `dtype`: what it is kept in; None is the weight's own type.
    - `initial`: its first value for a weight, in float32.
    """

    dtype: torch.dtype | None = torch.float32
    initial: Callable[[Tensor], Tensor] = torch.zeros_like


@dataclass
class Batch:
    """Parameters with the same settings and the same number of steps.

    - `weights`, `gradients`: float32, by parameter; a leading axis is that of the groups of
      replicas. Gradients are those of the loss itself, clipped; a rule leaves them as they are.
    - `values`: the attributes' values, by PyTorch's names.
    - `step`: how many updates this is, 1 for the first.
    - `slots`: accumulators by name, then by parameter.
    - `store`: rounds an accumulator to its type, keeps it, and makes it the value to go on with.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    values: dict[str, Any]
    step: float
    slots: dict[str, list[Tensor]]
    store: Callable[[str], None]

    def decayed(self) -> list[Tensor]:
        """The gradients of the loss with an L2 penalty of `weight_decay` / 2 on the weights."""
        decay = self.values["weight_decay"]
        if decay == 0:
            return self.gradients
        return list(torch._foreach_add(self.gradients, self.weights, alpha=decay))


class Rule(Protocol):
    """How an optimizer updates weights.

    - `elementwise`: whether an element's step depends on nothing else than that element.
    """

    elementwise: bool

    def slots(self, values: dict[str, Any], constant: set[str]) -> dict[str, Slot]:
        """The accumulators that it keeps; `constant` names the values that never change."""

    def update(self, batch: Batch) -> None:
        """One step."""
