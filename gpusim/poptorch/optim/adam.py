"""Adam, AdamW and LAMB: the optimizers, their update rules and their numbers for PopART."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .gradients import norms, per_group
from .optimizer import Optimizer
from .rule import Batch, Exported, Slot

__all__ = ["LAMB", "Adam", "AdamRule", "AdamW", "LAMBRule"]


class Adam(Optimizer, torch.optim.Adam):
    """Adam on simulated IPUs.

    **Arguments**

    - `params`, `lr`, `betas`, `eps`, `weight_decay`: torch.optim.Adam's.
    - `amsgrad`: must be False; setting the optimizer is a ValueError otherwise.
    - `foreach`, `maximize`, `capturable`, `differentiable`, `fused`: accepted; a model on IPUs
      ignores them.
    - `loss_scaling`: the factor of the loss in the backward pass.
    - `accum_type`, `first_order_momentum_accum_type`, `second_order_momentum_accum_type`:
      torch.float16 or torch.float32, that of accumulated gradients and of the two moments.
    - `max_grad_norm`: gradients are scaled down to it if their norm over the model is larger.

    **Raises**: AssertionError for other types.

    >>> import torch
    >>> optimizer = Adam([torch.nn.Parameter(torch.ones(2))], lr=0.1, loss_scaling=128.0)
    >>> optimizer.loss_scaling, optimizer.param_groups[0]["betas"]
    (128.0, (0.9, 0.999))
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._set_up(torch.optim.Adam.__init__, locals())


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay, on simulated IPUs.

    **Arguments**

    - `params`, `lr`, `betas`, `eps`, `weight_decay`: torch.optim.AdamW's.
    - `bias_correction`: False has no effect but a warning in the log: the moments are corrected
      for having started at zero, as PopTorch's compiler and torch's `step` do.
    - The others: those of `Adam`.

    **Raises**: AssertionError for accumulation types other than torch.float16 and torch.float32.

    >>> import torch
    >>> optimizer = AdamW([torch.nn.Parameter(torch.ones(2))], bias_correction=False)
    >>> optimizer.bias_correction, optimizer.param_groups[0]["weight_decay"]
    (False, 0.01)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        bias_correction: bool | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._set_up(torch.optim.AdamW.__init__, locals())


LAMB_DEFAULTS = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "max_weight_norm": 65500.0,  # about what float16 holds
}


def _initialise(optimizer: Any, params: Iterable[Any], **settings: Any) -> None:
    """Initialise torch's base class: torch.optim has no LAMB."""
    torch.optim.Optimizer.__init__(optimizer, params, {**LAMB_DEFAULTS, **settings})


class LAMB(Optimizer, torch.optim.Optimizer):
    """LAMB (https://arxiv.org/abs/1904.00962), on simulated IPUs and, by `step`, without.

    **Arguments**

    - `params`: parameters, or groups of them.
    - `lr`, `betas`, `eps`: as for `Adam`: 0.001, (0.9, 0.999) and 1e-8.
    - `weight_decay`: 0.01; added to the step, which is then scaled with it.
    - `bias_correction`: whether the moments are corrected for having started at zero; True.
    - `loss_scaling`: the factor of the loss in the backward pass.
    - `max_weight_norm`: norms of weights count as at most this; None is 65500.
    - `accum_type`, `first_order_momentum_accum_type`, `second_order_momentum_accum_type`:
      torch.float16 or torch.float32, that of accumulated gradients and of the two moments.

    **Raises**: AssertionError for other types.

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
        self._set_up(_initialise, locals())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters on the host from their `grad`, as torch's optimizers do.

        **Arguments**

        - `closure`: computes the loss again, and its gradients.

        **Returns**

        The closure's result, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rule = LAMBRule((torch.float32, torch.float32), self.bias_correction)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(rule, group, weight)
        return loss

    def _step(self, rule: LAMBRule, group: dict[str, Any], weight: torch.Tensor) -> None:
        state = self.state[weight]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(weight))
            state["exp_avg_sq"] = torch.zeros_like(weight)
        state["step"] += 1
        assert weight.grad is not None
        slots = {"Accl1": [state["exp_avg"][None]], "Accl2": [state["exp_avg_sq"][None]]}
        weights, gradients = [weight[None]], [weight.grad[None]]
        rule.update(Batch(weights, gradients, group, state["step"], slots, lambda slot: None))


# ---------------------------------------------------------------- rules


TINY = math.ulp(0.0)  # for 0 in a division, which is an error in Python


def power(beta: float, step: float) -> float:
    """beta**step; NaN or infinite as in C, for numbers that a user may have loaded."""
    if beta < 0 and not float(step).is_integer():
        return math.nan
    try:
        return float(beta**step)
    except (OverflowError, ZeroDivisionError):
        return math.inf


class Moments:
    """The moving averages of gradients and of their squares, Accl1 and Accl2."""

    def __init__(self, types: tuple[torch.dtype, torch.dtype], bias_correction: bool) -> None:
        self.types = types
        self.bias_correction = bias_correction

    def slots(self, values: dict[str, Any], constant: set[str]) -> dict[str, Slot]:
        first, second = self.types
        return {"Accl1": Slot(first), "Accl2": Slot(second)}

    def average(self, batch: Batch, gradients: list[Tensor]) -> None:
        """Add the gradients to the averages."""
        beta1, beta2 = batch.values["betas"]
        first, second = batch.slots["Accl1"], batch.slots["Accl2"]
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        batch.store("Accl1")
        batch.store("Accl2")

    def corrections(self, batch: Batch) -> tuple[float, float]:
        """The divisors that correct averages which started at zero."""
        if not self.bias_correction:
            return 1.0, 1.0
        beta1, beta2 = batch.values["betas"]
        first, second = (1 - power(beta, batch.step) for beta in (beta1, beta2))
        return first or TINY, second or TINY

    def denominators(self, batch: Batch, correction: float) -> list[Tensor]:
        """The root of the corrected second moment, plus `eps`."""
        roots = list(torch._foreach_sqrt(batch.slots["Accl2"]))
        torch._foreach_div_(roots, math.sqrt(correction) if correction >= 0 else math.nan)
        torch._foreach_add_(roots, batch.values["eps"])
        return roots


class AdamRule(Moments):
    """Adam, or with `decoupled` AdamW."""

    elementwise = True

    def __init__(
        self,
        types: tuple[torch.dtype, torch.dtype],
        decoupled: bool = False,
    ) -> None:
        super().__init__(types, bias_correction=True)
        self.decoupled = decoupled

    def update(self, batch: Batch) -> None:
        lr, decay = batch.values["lr"], batch.values["weight_decay"]
        self.average(batch, batch.gradients if self.decoupled else batch.decayed())
        if self.decoupled and decay:
            torch._foreach_mul_(batch.weights, 1 - lr * decay)
        correction1, correction2 = self.corrections(batch)
        roots = self.denominators(batch, correction2)
        torch._foreach_addcdiv_(batch.weights, batch.slots["Accl1"], roots, -lr / correction1)


class LAMBRule(Moments):
    """Adam's step, scaled for each parameter by the ratio of its weights' norm and the step's.

    The ratio is 1 where a norm is 0. Each group of replicas has its own norms.
    """

    elementwise = False

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
            step.mul_(per_group(torch.where(either, 1.0, of_weight / of_step), step))
        torch._foreach_add_(batch.weights, steps, alpha=-values["lr"])


# ---------------------------------------------------------------- ipu_param

LEARNING_RATE_AND_DECAY: tuple[Exported, ...] = (
    ("learningRate", ("lr",), lambda lr: lr),
    ("weightDecay", ("weight_decay",), lambda decay: decay),
)
ADAM: tuple[Exported, ...] = (
    *LEARNING_RATE_AND_DECAY,
    ("adamBeta1", ("betas",), lambda betas: betas[0]),
    ("adamBeta2", ("betas",), lambda betas: betas[1]),
    ("adamEps", ("eps",), lambda eps: eps),
)
LAMB_NUMBERS = (*ADAM, ("maxWeightNorm", ("max_weight_norm",), lambda norm: norm))
