"""Accumulators of all parameters, and their form in an optimizer's `state_dict`: `ipu_state`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._logging import logger

__all__ = ["State"]

STEP = "Step"
FACTOR = "lossScaleUpdateFactor"
UPDATES = "gpusim___updates"


@dataclass
class State:
    """What an Updater keeps between updates.

    - `slots`: accumulators by parameter, then by PopART's name, with the parameter's leading axis.
    - `steps`: how often each parameter was updated.
    - `updates`: how many updates there were, which stochastic rounding counts by.
    - `factor`: automatic loss scaling's.
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

        - `shapes`: the parameters' own: of one that differs among groups of replicas, with the
          number of groups in front, of others without.
        - `counted`, `automatic`, `stochastic`: whether there are steps, a factor and updates to
          save.
        """
        found = {}
        for parameter, slots in self.slots.items():
            own = shapes[parameter]
            for name, value in slots.items():
                # that of a user who has a copy for every replica is larger
                shape = own if own.numel() == value.numel() else value.shape
                # a copy in any case, also where the memory is the host's already
                found[f"{name}___{parameter}"] = value.detach().cpu().clone().reshape(shape)
            if counted:
                found[f"{STEP}___{parameter}"] = torch.tensor(float(self.steps[parameter]))
        if automatic:
            found[FACTOR] = torch.tensor(self.factor)
        if stochastic:
            found[UPDATES] = torch.tensor(float(self.updates), dtype=torch.float64)
        return found

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over the values that are there; others stay.

        ValueError, before anything is changed, for one that has another number of elements.
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
        with torch.no_grad():
            for name, value in own.items():
                if name in tensors:
                    value.copy_(tensors[name].reshape(value.shape))
        for parameter in self.steps:
            if (step := tensors.get(f"{STEP}___{parameter}")) is not None:
                self.steps[parameter] = float(step)
        if FACTOR in tensors:
            self.factor = float(tensors[FACTOR])
        if UPDATES in tensors:
            self.updates = max(0, round(float(tensors[UPDATES])))
