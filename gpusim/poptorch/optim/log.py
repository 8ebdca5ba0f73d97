"""The values of an optimizer in the DEBUG log, by the names that PopART has for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from .._logging import logger
from .settings import Settings, Value

__all__ = ["log_values"]

#: PopART's names of the attributes, in its order; a pair has two.
NAMES = {
    "lr": ("learningRate",),
    "weight_decay": ("weightDecay",),
    "alpha": ("alpha",),
    "momentum": ("momentum",),
    "dampening": ("dampening",),
    "velocity_scaling": ("velocityScaling",),
    "nesterov": ("nesterov",),
    "betas": ("beta1", "beta2"),
    "eps": ("eps",),
    "max_weight_norm": ("maxWeightNorm",),
}
TYPES = {
    "accumType": ("accum_type",),
    "firstOrderMomentumAccumType": ("first_order_momentum_accum_type", "velocity_accum_type"),
    "secondOrderMomentumAccumType": ("second_order_momentum_accum_type",),
}


def log_values(settings: Settings) -> None:
    """Log the values of the defaults, which are the graph's, and of each group."""
    kind = settings.kind.name.removesuffix("_NO_BIAS").removesuffix("_CENTERED")
    types = [f"{name}={type_of(settings, attributes)}" for name, attributes in TYPES.items()]
    scaling = printed("lossScaling", settings.loss_scaling)
    defaults = [
        f"default{text[0].upper()}{text[1:]}" for text in values_of(settings, settings.defaults)
    ]
    logger.debug("Updating graph optimizer with %s", ", ".join([kind, *defaults, scaling, *types]))
    for number, group in enumerate(settings.groups):
        logger.debug(
            "Updating group %d optimizer with %s for (tensors affected [%s])",
            number,
            ", ".join([kind, *values_of(settings, group), *types]),
            ", ".join(name for name, of in settings.group_of.items() if of == number),
        )


def values_of(settings: Settings, group: Mapping[str, Value]) -> Iterator[str]:
    """The values of a group, as "learningRate=0.01 (const)"."""
    found = settings.scaled(group)
    for attribute, names in NAMES.items():
        if attribute in found:
            value, constant = found[attribute].value, found[attribute].constant
            for name, part in zip(names, value if len(names) > 1 else [value], strict=True):
                yield printed(name, Value(part, constant))


def printed(name: str, value: Value) -> str:
    number = repr(float(value.value)).removesuffix(".0")
    return f"{name}={number}{' (const)' if value.constant else ''}"


def type_of(settings: Settings, attributes: tuple[str, ...]) -> str:
    """The accumulator's type; float32 for one that this kind of optimizer lacks."""
    found = (settings.types[name] for name in attributes if name in settings.types)
    return str(next(found, torch.float32)).removeprefix("torch.")
