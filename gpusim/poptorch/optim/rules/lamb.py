"""LAMB's step: Adam's, scaled for each parameter by its weights' norm over that of the step."""

from __future__ import annotations

import torch

from ..norms import along, norms
from .adam import Moments
from .batch import Batch

__all__ = ["LAMB"]


class LAMB(Moments):
    """The ratio is 1 where either norm is 0; norms are taken for each group of replicas."""

    elementwise = False  # of a parameter, norms are taken

    def update(self, batch: Batch) -> None:
        values = batch.values
        self.average(batch, batch.gradients)
        correction1, correction2 = self.corrections(batch)
        steps = list(torch._foreach_div(batch.slots["Accl1"], correction1))
        torch._foreach_div_(steps, self.denominators(batch, correction2))
        if values["weight_decay"]:
            torch._foreach_add_(steps, batch.weights, alpha=values["weight_decay"])
        pairs = zip(norms(batch.weights), norms(steps), strict=True)
        for step, (of_weight, of_step) in zip(steps, pairs, strict=True):
            of_weight = of_weight.clamp(max=values["max_weight_norm"])
            either = (of_weight == 0) | (of_step == 0)
            step.mul_(along(torch.where(either, 1.0, of_weight / of_step), step))
        torch._foreach_add_(batch.weights, steps, alpha=-values["lr"])
