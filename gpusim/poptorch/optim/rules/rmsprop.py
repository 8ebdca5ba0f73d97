"""RMSprop's step: torch.optim's, or TensorFlow's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .batch import Batch, Slot
from .sgd import has_momentum

__all__ = ["RMSprop"]


class RMSprop:
    """Accl1 is the average of squares, Accl2 that of gradients, if centred, Accl3 the momentum."""

    elementwise = True

    def __init__(
        self, types: tuple[torch.dtype, torch.dtype], centered: bool, tensorflow: bool
    ) -> None:
        self.types = types
        self.centered = centered
        self.tensorflow = tensorflow

    def slots(self, values: dict[str, Any], constant: set[str]) -> dict[str, Slot]:
        first, second = self.types
        found = {"Accl1": Slot(first, torch.ones_like if self.tensorflow else torch.zeros_like)}
        if self.centered:
            found["Accl2"] = Slot(second)
        if has_momentum(values, constant):
            found["Accl3"] = Slot()
        return found

    def update(self, batch: Batch) -> None:
        lr = batch.values["lr"]
        gradients = batch.decayed()
        self.average(batch, gradients)
        roots = self.denominators(batch)
        if "Accl3" not in batch.slots:
            torch._foreach_addcdiv_(batch.weights, gradients, roots, -lr)
            return
        momenta = batch.slots["Accl3"]
        torch._foreach_mul_(momenta, batch.values["momentum"])
        torch._foreach_addcdiv_(momenta, gradients, roots, lr if self.tensorflow else 1.0)
        batch.store("Accl3")
        torch._foreach_add_(batch.weights, momenta, alpha=-1.0 if self.tensorflow else -lr)

    def average(self, batch: Batch, gradients: list[Tensor]) -> None:
        """Take the gradients into the averages."""
        alpha = batch.values["alpha"]
        squares = batch.slots["Accl1"]
        torch._foreach_mul_(squares, alpha)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - alpha)
        batch.store("Accl1")
        if self.centered:
            torch._foreach_lerp_(batch.slots["Accl2"], gradients, 1 - alpha)
            batch.store("Accl2")

    def denominators(self, batch: Batch) -> list[Tensor]:
        """The root of the average, of the variance if centred, with `eps` in it or beside it."""
        eps, squares = batch.values["eps"], batch.slots["Accl1"]
        if self.centered:
            means = batch.slots["Accl2"]
            roots = list(torch._foreach_addcmul(squares, means, means, -1.0))
        else:
            roots = [square.clone() for square in squares]
        if self.tensorflow:
            torch._foreach_add_(roots, eps)
        torch._foreach_sqrt_(roots)
        if not self.tensorflow:
            torch._foreach_add_(roots, eps)
        return roots
