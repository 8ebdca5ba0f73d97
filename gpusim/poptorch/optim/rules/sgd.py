"""Gradient descent: plain, with a velocity, and with velocity and gradient in one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .batch import Batch, Slot

__all__ = ["CombinedSGD", "SeparateSGD", "has_momentum"]


def has_momentum(values: dict[str, Any], constant: set[str]) -> bool:
    """Whether there is a velocity: momentum is not 0, or may become something else."""
    return values["momentum"] != 0 or "momentum" not in constant


def descend(batch: Batch) -> None:
    """Without a velocity; dampening scales the step all the same."""
    values = batch.values
    alpha = -values["lr"] * (1 - values["dampening"])
    torch._foreach_add_(batch.weights, batch.decayed(), alpha=alpha)


class SeparateSGD:
    """The velocity by itself, multiplied by the loss scaling; gradients accumulate elsewhere."""

    elementwise = True

    def __init__(self, velocity_type: torch.dtype) -> None:
        self.velocity_type = velocity_type

    def slots(self, values: dict[str, Any], constant: set[str]) -> dict[str, Slot]:
        return {"Accl1": Slot(self.velocity_type)} if has_momentum(values, constant) else {}

    def update(self, batch: Batch) -> None:
        if "Accl1" not in batch.slots:
            descend(batch)
            return
        values, velocities = batch.values, batch.slots["Accl1"]
        momentum, scaling = values["momentum"], values["velocity_scaling"]
        gradients = batch.decayed()
        torch._foreach_mul_(velocities, momentum)
        torch._foreach_add_(velocities, gradients, alpha=(1 - values["dampening"]) * scaling)
        batch.store("Accl1")
        if values["nesterov"] and momentum > 0:
            steps = list(torch._foreach_add(gradients, velocities, alpha=momentum / scaling))
            torch._foreach_add_(batch.weights, steps, alpha=-values["lr"])
        else:
            torch._foreach_add_(batch.weights, velocities, alpha=-values["lr"] / scaling)


class CombinedSGD:
    """One tensor, in the weights' type, that gradients are added to and that is then the velocity.

    Between updates it already holds what the next velocity has beside the gradient. That is made
    with the settings of the update before: a changed momentum takes effect one update later.
    """

    elementwise = True

    def slots(self, values: dict[str, Any], constant: set[str]) -> dict[str, Slot]:
        if not has_momentum(values, constant):
            return {}
        decay = (1 - values["dampening"]) * values["velocity_scaling"] * values["weight_decay"]

        def initial(weight: Tensor) -> Tensor:
            return weight * decay if decay else torch.zeros_like(weight)

        return {"Accl": Slot(None, initial)}

    def update(self, batch: Batch) -> None:
        if "Accl" not in batch.slots:
            descend(batch)
            return
        values, velocities = batch.values, batch.slots["Accl"]
        momentum, scaling = values["momentum"], values["velocity_scaling"]
        share = (1 - values["dampening"]) * scaling
        torch._foreach_add_(velocities, batch.gradients, alpha=share)
        batch.store("Accl")
        if values["nesterov"] and momentum > 0:
            steps = list(torch._foreach_add(batch.decayed(), velocities, alpha=momentum / scaling))
            torch._foreach_add_(batch.weights, steps, alpha=-values["lr"])
        else:
            torch._foreach_add_(batch.weights, velocities, alpha=-values["lr"] / scaling)
        torch._foreach_mul_(velocities, momentum)
        if values["weight_decay"]:
            alpha = share * values["weight_decay"]
            torch._foreach_add_(velocities, batch.weights, alpha=alpha)
        batch.store("Accl")
