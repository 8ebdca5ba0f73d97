"""Adam's step, with the weight decay in the gradient or beside it; the order of torch.optim's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .batch import Batch, Slot

__all__ = ["Adam", "Moments"]


class Moments:
    """The moving averages of gradients and of their squares, Accl1 and Accl2."""

    def __init__(self, types: tuple[torch.dtype, torch.dtype], bias_correction: bool) -> None:
        self.types = types
        self.bias_correction = bias_correction

    def slots(self, values: dict[str, Any], constant: set[str]) -> dict[str, Slot]:
        first, second = self.types
        return {"Accl1": Slot(first), "Accl2": Slot(second)}

    def average(self, batch: Batch, gradients: list[Tensor]) -> None:
        """Take the gradients into the averages."""
        beta1, beta2 = batch.values["betas"]
        first, second = batch.slots["Accl1"], batch.slots["Accl2"]
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        batch.store("Accl1")
        batch.store("Accl2")

    def corrections(self, batch: Batch) -> tuple[float, float]:
        """What the averages of values that started at zero are to be divided by."""
        if not self.bias_correction:
            return 1.0, 1.0
        beta1, beta2 = batch.values["betas"]
        return 1 - beta1**batch.step, 1 - beta2**batch.step

    def denominators(self, batch: Batch, correction: float) -> list[Tensor]:
        """The root of the corrected second moment, and `eps`."""
        roots = list(torch._foreach_sqrt(batch.slots["Accl2"]))
        torch._foreach_div_(roots, math.sqrt(correction))
        torch._foreach_add_(roots, batch.values["eps"])
        return roots


class Adam(Moments):
    """Adam, or with `decoupled` AdamW."""

    elementwise = True

    def __init__(
        self,
        types: tuple[torch.dtype, torch.dtype],
        bias_correction: bool = True,
        decoupled: bool = False,
    ) -> None:
        super().__init__(types, bias_correction)
        self.decoupled = decoupled

    def update(self, batch: Batch) -> None:
        lr, decay = batch.values["lr"], batch.values["weight_decay"]
        self.average(batch, batch.gradients if self.decoupled else batch.decayed())
        if self.decoupled and decay:
            torch._foreach_mul_(batch.weights, 1 - lr * decay)
        correction1, correction2 = self.corrections(batch)
        roots = self.denominators(batch, correction2)
        torch._foreach_addcdiv_(batch.weights, batch.slots["Accl1"], roots, -lr / correction1)
