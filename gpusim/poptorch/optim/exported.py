"""`ipu_param`: an optimizer's variable values as tensors, by PopART's names and by parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .kinds import OptimizerType
from .rules.sgd import has_momentum
from .settings import Settings

__all__ = ["exported_values"]

#: PopART's name, the attributes that the number is made of, and how.
Exported = tuple[str, tuple[str, ...], Callable[..., float]]

ADAM: tuple[Exported, ...] = (
    ("learningRate", ("lr",), lambda lr: lr),
    ("weightDecay", ("weight_decay",), lambda decay: decay),
    ("adamBeta1", ("betas",), lambda betas: betas[0]),
    ("adamBeta2", ("betas",), lambda betas: betas[1]),
    ("adamEps", ("eps",), lambda eps: eps),
)
LAMB = (*ADAM, ("maxWeightNorm", ("max_weight_norm",), lambda norm: norm))
RMSPROP: tuple[Exported, ...] = (
    *ADAM[:2],
    ("adaptiveAlpha", ("alpha",), lambda alpha: alpha),
    ("adaptiveMomentum", ("momentum",), lambda momentum: momentum),
    ("adaptiveEps", ("eps",), lambda eps: eps),
)
# gradient descent has products of them
PLAIN_SGD: tuple[Exported, ...] = (
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


def momentum_sgd(number: int) -> tuple[Exported, ...]:
    """Of SGD1 or SGD2, whose names differ by the number."""
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


TABLES = {
    OptimizerType.RMSPROP: RMSPROP,
    OptimizerType.RMSPROP_CENTERED: RMSPROP,
    OptimizerType.LAMB: LAMB,
    OptimizerType.LAMB_NO_BIAS: LAMB,
}


def exported_values(settings: Settings) -> dict[str, Tensor]:
    """Float32 numbers by name. Those that are made of constants only are not there."""
    found: dict[str, Tensor] = {}
    if not settings.loss_scaling.constant:
        found["lossScaling_FLOAT"] = torch.tensor(float(settings.loss_scaling.value))
    for parameter, group in settings.group_of.items():
        values = settings.values(group) | {"loss_scaling": settings.loss_scaling.value}
        constant = constants(settings, group)
        for name, attributes, combine in table(settings.kind, values, constant):
            if not constant.issuperset(attributes):
                number = combine(*(values[attribute] for attribute in attributes))
                found[f"{name}___specific___{parameter}"] = torch.tensor(float(number))
    return found


def table(kind: OptimizerType, values: dict[str, Any], constant: set[str]) -> tuple[Exported, ...]:
    if kind in (OptimizerType.SGD1, OptimizerType.SGD2):
        number = 1 if kind == OptimizerType.SGD1 else 2
        return momentum_sgd(number) if has_momentum(values, constant) else PLAIN_SGD
    return TABLES.get(kind, ADAM)


def constants(settings: Settings, group: int) -> set[str]:
    """The attributes that are constant, loss scaling included."""
    found = settings.constant(group)
    if not settings.loss_scaling.constant:
        if settings.kind == OptimizerType.SGD2:  # the velocities follow it
            found -= {"velocity_scaling"}
        return found
    return found | {"loss_scaling"}
