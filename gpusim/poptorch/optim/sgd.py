"""Stochastic gradient descent, as torch.optim.SGD and with PopTorch's accumulators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._logging import logger
from .base import Optimizer

__all__ = ["SGD"]


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent with optional momentum, on simulated IPUs.

    **Arguments**

    - `params`, `lr`, `momentum`, `dampening`, `weight_decay`, `nesterov`: torch.optim.SGD's.
    - `maximize`, `foreach`, `differentiable`: accepted; a model on IPUs ignores them.
    - `loss_scaling`: what the loss is multiplied by before the backward pass.
    - `velocity_scaling`: what velocities are kept multiplied by; with `use_combined_accum` only.
    - `use_combined_accum`: one tensor for the accumulated gradient and the velocity.
    - `accum_type`, `velocity_accum_type`: torch.float16 or torch.float32, that of accumulated
      gradients and of velocities; without `use_combined_accum` only.
    - `max_grad_norm`: gradients are scaled down to it if their norm over the model is larger.

    AssertionError for other types.

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
        self._set_up(
            torch.optim.SGD.__init__,
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "maximize": maximize,
                "foreach": foreach,
                "differentiable": differentiable,
            },
            {
                "loss_scaling": loss_scaling,
                "use_combined_accum": use_combined_accum,
                "accum_type": accum_type,
                "velocity_accum_type": velocity_accum_type,
                "max_grad_norm": max_grad_norm,
            },
        )
        self._set_velocity_scaling(velocity_scaling)

    def _set_velocity_scaling(self, given: float | None) -> None:
        """Groups may each have their own, so it is kept where torch keeps such values."""
        if not self.use_combined_accum:
            if given is not None:
                logger.warning(
                    "velocity_scaling value ignored when using the separate variant "
                    "(use_combined_accum=False). In future, this will lead to an error. Please "
                    "update your code."
                )
            return
        scaling = 1.0 if given is None else given
        self.defaults["velocity_scaling"] = scaling
        for group in self.param_groups:
            group.setdefault("velocity_scaling", scaling)
        variable = self.variable_attrs._variable_attributes
        self._allow([*variable, *(["velocity_scaling"] if given is not None else [])])
