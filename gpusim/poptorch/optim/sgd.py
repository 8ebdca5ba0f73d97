"""Stochastic gradient descent: the optimizer, its update rules and its numbers for PopART."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .._logging import logger
from .optimizer import Optimizer
from .rule import Batch, Exported, Slot

__all__ = ["SGD", "CombinedSGD", "SeparateSGD", "has_momentum"]


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent with optional momentum, on simulated IPUs.

    **Arguments**

    - `params`, `lr`, `momentum`, `dampening`, `weight_decay`, `nesterov`: torch.optim.SGD's.
    - `maximize`, `foreach`, `differentiable`: accepted; a model on IPUs ignores them.
    - `loss_scaling`: the factor of the loss in the backward pass.
    - `velocity_scaling`: the factor of stored velocities; with `use_combined_accum` only.
    - `use_combined_accum`: one tensor for the accumulated gradient and the velocity.
    - `accum_type`, `velocity_accum_type`: torch.float16 or torch.float32, that of accumulated
      gradients and of velocities; without `use_combined_accum` only.
    - `max_grad_norm`: gradients are scaled down to it if their norm over the model is larger.

    **Raises**: AssertionError for other types.

    >>> import torch
    >>> optimizer = SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    >>> optimizer.variable_attrs.isConstant("momentum")
    False
    >>> optimizer.variable_attrs.isConstant("weight_decay")
    True
    """

    use_combined_accum: bool

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | None = None,
        nesterov: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        velocity_scaling: float | None = None,
        use_combined_accum: bool | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._set_up(torch.optim.SGD.__init__, locals(), "velocity_scaling")
        self._set_velocity_scaling(velocity_scaling)

    def _set_velocity_scaling(self, passed: float | None) -> None:
        """Store it in the groups, as torch does: each group may have its own."""
        if not self.use_combined_accum:
            if passed is not None:
                logger.warning(
                    "velocity_scaling value ignored when using the separate variant "
                    "(use_combined_accum=False). In future, this will lead to an error. Please "
                    "update your code."
                )
            return
        scaling = 1.0 if passed is None else passed
        self.defaults["velocity_scaling"] = scaling
        for group in self.param_groups:
            group.setdefault("velocity_scaling", scaling)
        variable = self.variable_attrs._variable_attributes
        self._allow([*variable, *(["velocity_scaling"] if passed is not None else [])])


# ---------------------------------------------------------------- rules

#: The key, among a rule's values, of PopART's numbers where a user has loaded others.
NUMBERS = "numbers"
#: The key of the loss scaling among these: gradients come without it.
SCALING = "lossScaling"


def has_momentum(values: dict[str, Any], constant: set[str]) -> bool:
    """Whether there is a velocity: the momentum is not 0, or may change."""
    return values["momentum"] != 0 or "momentum" not in constant


def descend(batch: Batch) -> None:
    """The step without a velocity. Dampening scales it too."""
    values = batch.values
    if NUMBERS in values:
        numbers = values[NUMBERS]
        torch._foreach_mul_(batch.weights, numbers["weightDecayScaleFactor0"])
        alpha = -numbers["scaledLearningRate0"] * numbers[SCALING]
        torch._foreach_add_(batch.weights, batch.gradients, alpha=alpha)
        return
    alpha = -values["lr"] * (1 - values["dampening"])
    torch._foreach_add_(batch.weights, batch.decayed(), alpha=alpha)


def descend_along(
    batch: Batch, velocities: list[Tensor], gradients: Callable[[], list[Tensor]]
) -> None:
    """The step along the velocities, with Nesterov's momentum or without."""
    values = batch.values
    momentum, scaling = values["momentum"], values["velocity_scaling"]
    if values["nesterov"] and momentum > 0:
        steps = list(torch._foreach_add(gradients(), velocities, alpha=momentum / scaling))
        torch._foreach_add_(batch.weights, steps, alpha=-values["lr"])
    else:
        torch._foreach_add_(batch.weights, velocities, alpha=-values["lr"] / scaling)


class SeparateSGD:
    """SGD2: the velocity has a tensor of its own, and is multiplied by the loss scaling."""

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
        if NUMBERS in values:
            numbers = values[NUMBERS]
            torch._foreach_mul_(velocities, numbers["scaledMomentum2"])
            share = numbers["dampeningScaleFactor2"] * numbers[SCALING]
            torch._foreach_add_(velocities, batch.gradients, alpha=share)
            torch._foreach_add_(velocities, batch.weights, alpha=numbers["scaledWeightDecay1"])
            batch.store("Accl1")
            torch._foreach_add_(batch.weights, velocities, alpha=-numbers["scaledLearningRate2"])
            return
        share = (1 - values["dampening"]) * values["velocity_scaling"]
        gradients = batch.decayed()
        torch._foreach_mul_(velocities, values["momentum"])
        torch._foreach_add_(velocities, gradients, alpha=share)
        batch.store("Accl1")
        descend_along(batch, velocities, lambda: gradients)


class CombinedSGD:
    """SGD1: one tensor in the weights' type, to which gradients are added, is the velocity too.

    Between updates it holds the next velocity less the gradient. That is computed with the
    settings of the update before: a changed momentum takes effect one update later.
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
        if NUMBERS in values:
            numbers = values[NUMBERS]
            share = numbers["dampeningScaleFactor1"] * numbers[SCALING]
            torch._foreach_add_(velocities, batch.gradients, alpha=share)
            batch.store("Accl")
            torch._foreach_add_(batch.weights, velocities, alpha=-numbers["scaledLearningRate1"])
            torch._foreach_mul_(velocities, numbers["scaledMomentum1"])
            torch._foreach_add_(velocities, batch.weights, alpha=numbers["scaledWeightDecay1"])
            batch.store("Accl")
            return
        share = (1 - values["dampening"]) * values["velocity_scaling"]
        torch._foreach_add_(velocities, batch.gradients, alpha=share)
        batch.store("Accl")
        descend_along(batch, velocities, batch.decayed)
        torch._foreach_mul_(velocities, values["momentum"])
        if values["weight_decay"]:
            alpha = share * values["weight_decay"]
            torch._foreach_add_(velocities, batch.weights, alpha=alpha)
        batch.store("Accl")


# ---------------------------------------------------------------- ipu_param

# PopART has products of the attributes.
PLAIN: tuple[Exported, ...] = (
    (
        "scaledLearningRate0",
        ("lr", "dampening", "loss_scaling"),
        lambda lr, dampening, scaling: lr * (1 - dampening) / scaling,
    ),
    (
        "weightDecayScaleFactor0",
        ("lr", "dampening", "weight_decay"),
        lambda lr, dampening, decay: 1 - lr * (1 - dampening) * decay,
    ),
)


def with_momentum(number: int) -> tuple[Exported, ...]:
    """The numbers of SGD1 or SGD2."""
    return (
        (
            "scaledWeightDecay1",
            ("dampening", "weight_decay", "velocity_scaling"),
            lambda dampening, decay, velocity: (1 - dampening) * decay * velocity,
        ),
        (
            f"dampeningScaleFactor{number}",
            ("dampening", "velocity_scaling", "loss_scaling"),
            lambda dampening, velocity, scaling: (1 - dampening) * velocity / scaling,
        ),
        (
            f"scaledLearningRate{number}",
            ("lr", "velocity_scaling"),
            lambda lr, velocity: lr / velocity,
        ),
        (f"scaledMomentum{number}", ("momentum",), lambda momentum: momentum),
    )
