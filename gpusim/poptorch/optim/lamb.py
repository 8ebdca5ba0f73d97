"""LAMB, layer-wise adaptive moments, which torch.optim has not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .base import Optimizer
from .rules.batch import Batch
from .rules.lamb import LAMB as Rule

__all__ = ["LAMB"]

DEFAULTS = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "max_weight_norm": 65500.0,  # about what float16 holds
}


def initialise(optimizer: Any, params: Iterable[Any], **given: Any) -> None:
    """torch's part, for an optimizer that torch has not."""
    torch.optim.Optimizer.__init__(optimizer, params, {**DEFAULTS, **given})


class LAMB(Optimizer, torch.optim.Optimizer):
    """LAMB (https://arxiv.org/abs/1904.00962), on simulated IPUs and, by `step`, without.

    **Arguments**

    - `params`: parameters, or groups of them.
    - `lr`, `betas`, `eps`: as of Adam, 0.001, (0.9, 0.999) and 1e-8.
    - `weight_decay`: 0.01; added to the step, which is then scaled with it.
    - `bias_correction`: whether the moments are corrected for having started at zero; True.
    - `loss_scaling`: what the loss is multiplied by before the backward pass.
    - `max_weight_norm`: norms of weights count as at most this; None is 65500.
    - `accum_type`, `first_order_momentum_accum_type`, `second_order_momentum_accum_type`:
      torch.float16 or torch.float32, that of accumulated gradients and of the two moments.

    AssertionError for other types.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = LAMB([weight], lr=0.1, weight_decay=0.0)
    >>> weight.grad = torch.tensor([1.0, 1.0])
    >>> optimizer.step()
    >>> weight.data  # a step of 0.1 times the weights' norm, 5
    tensor([2.6464, 3.6464])
    """

    bias_correction: bool

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        bias_correction: bool | None = None,
        loss_scaling: float | None = None,
        max_weight_norm: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
    ) -> None:
        self._set_up(
            initialise,
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "max_weight_norm": max_weight_norm,
            },
            {
                "loss_scaling": loss_scaling,
                "bias_correction": bias_correction,
                "accum_type": accum_type,
                "first_order_momentum_accum_type": first_order_momentum_accum_type,
                "second_order_momentum_accum_type": second_order_momentum_accum_type,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One update on the host, from the parameters' `grad`, as torch's optimizers do.

        **Arguments**

        - `closure`: computes the loss again, and its gradients. Its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rule = Rule((torch.float32, torch.float32), self.bias_correction)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(rule, group, weight)
        return loss

    def _step(self, rule: Rule, group: dict[str, Any], weight: torch.Tensor) -> None:
        state = self.state[weight]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(weight))
            state["exp_avg_sq"] = torch.zeros_like(weight)
        state["step"] += 1
        assert weight.grad is not None
        slots = {"Accl1": [state["exp_avg"][None]], "Accl2": [state["exp_avg_sq"][None]]}
        weights, gradients = [weight[None]], [weight.grad[None]]
        rule.update(Batch(weights, gradients, group, state["step"], slots, lambda slot: None))
