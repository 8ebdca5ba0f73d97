"""The state of an optimizer's updates, and its form in `state_dict`: `ipu_state`, `ipu_param`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._logging import logger
from .kinds import KINDS
from .settings import Settings
from .sgd import NUMBERS

__all__ = ["LOSS_SCALE", "LOSS_SCALING", "SPECIFIC", "OptimizerState", "exported_values"]

LOSS_SCALE = "finalLossScale"  # with the factor of automatic loss scaling
LOSS_SCALING = "lossScaling_FLOAT"
SPECIFIC = "___specific___"  # between the name of a value and its parameter's
STEP = "Step"
FACTOR = "lossScaleUpdateFactor"
UPDATES = "gpusim___updates"


@dataclass
class OptimizerState:
    """The state of an Updater between updates.

    - `slots`: accumulators by parameter, then by PopART's name, with the parameter's leading axis.
    - `steps`: how often each parameter was updated.
    - `updates`: the number of updates; it selects the bits of stochastic rounding.
    - `factor`: the factor of automatic loss scaling.
    """

    slots: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    updates: int = 0
    factor: float = 1.0

    def tensors(
        self,
        shapes: dict[str, torch.Size],
        *,
        counted: bool,
        automatic: bool,
        stochastic: bool,
    ) -> dict[str, Tensor]:
        """Copies on the host, by name: "Accl1___lin.weight".

        **Arguments**

        - `shapes`: those of the user's parameters. All tensors of a parameter that differs among
          groups of replicas, also its step, have the number of groups in front.
        - `counted`, `automatic`, `stochastic`: whether to include steps, the factor and the number
          of updates.
        """
        found = {}
        for parameter, slots in self.slots.items():
            own = shapes[parameter]
            groups: tuple[int, ...] = ()
            for name, value in slots.items():
                # a user's parameter with a copy for every replica is larger
                shape = own if own.numel() == value.numel() else value.shape
                groups = value.shape[:1] if shape == value.shape else ()
                # a copy also of memory that is the host's already
                found[f"{name}___{parameter}"] = value.detach().cpu().clone().reshape(shape)
            if counted:
                found[f"{STEP}___{parameter}"] = torch.full(groups, float(self.steps[parameter]))
        if automatic:
            found[FACTOR] = torch.tensor(self.factor)
        if stochastic:
            found[UPDATES] = torch.tensor(float(self.updates), dtype=torch.float64)
        return found

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over the values of these tensors; others stay.

        **Raises**: ValueError, before anything is changed, for another number of elements, and for
        groups of replicas with different steps.
        """
        logger.info("Writing optimiser state tensors from host to IPU memory.")
        own = {
            f"{name}___{parameter}": value
            for parameter, slots in self.slots.items()
            for name, value in slots.items()
        }
        for name, value in own.items():
            if name in tensors and tensors[name].numel() != value.numel():
                raise ValueError(
                    f"{name}: the loaded state has the shape {tuple(tensors[name].shape)}, "
                    f"expected {value.numel()} elements, {value.shape[0]} group(s) of "
                    f"{tuple(value.shape[1:])}"
                )
        steps = {one: tensors.get(f"{STEP}___{one}") for one in self.steps}
        for parameter, step in steps.items():
            if step is not None and len(set(step.flatten().tolist())) != 1:
                raise ValueError(
                    f"{STEP}___{parameter}: expected one step for all groups of replicas, got "
                    f"{step.tolist()}"
                )
        with torch.no_grad():
            for name, value in own.items():
                if name in tensors:
                    value.copy_(tensors[name].reshape(value.shape))
        for parameter, step in steps.items():
            if step is not None:
                self.steps[parameter] = float(step.flatten()[0])
        if FACTOR in tensors:
            self.factor = float(tensors[FACTOR])
        if UPDATES in tensors:
            self.updates = max(0, round(float(tensors[UPDATES])))


def exported_values(settings: Settings) -> dict[str, Tensor]:
    """The float32 numbers of `ipu_param` by name, without those made of constants only."""
    found: dict[str, Tensor] = {}
    if not settings.loss_scaling.constant:
        found[LOSS_SCALING] = torch.tensor(float(settings.loss_scaling.value))
    for parameter, group in settings.group_of.items():
        values = settings.values(group) | {"loss_scaling": settings.loss_scaling.value}
        numbers = values.get(NUMBERS, {})
        constant = constants(settings, group)
        for name, attributes, combine in KINDS[settings.kind].exported(values, constant):
            if not constant.issuperset(attributes):
                number = (
                    numbers[name]
                    if name in numbers
                    else combine(*(values[attribute] for attribute in attributes))
                )
                found[f"{name}{SPECIFIC}{parameter}"] = torch.tensor(float(number))
    return found


def constants(settings: Settings, group: int) -> set[str]:
    """The attributes that are constant, loss scaling included."""
    found = settings.constant(group)
    return found | {"loss_scaling"} if settings.loss_scaling.constant else found
