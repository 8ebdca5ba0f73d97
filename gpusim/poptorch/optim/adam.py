"""Adam and AdamW, as torch.optim's and with PopTorch's accumulators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .base import Optimizer

__all__ = ["Adam", "AdamW"]


class Adam(Optimizer, torch.optim.Adam):
    """Adam on simulated IPUs.

    **Arguments**

    - `params`, `lr`, `betas`, `eps`, `weight_decay`: torch.optim.Adam's.
    - `amsgrad`: must be False; setting the optimizer is a ValueError otherwise.
    - `foreach`, `maximize`, `capturable`, `differentiable`, `fused`: accepted; a model on IPUs
      ignores them.
    - `loss_scaling`: what the loss is multiplied by before the backward pass.
    - `accum_type`, `first_order_momentum_accum_type`, `second_order_momentum_accum_type`:
      torch.float16 or torch.float32, that of accumulated gradients and of the two moments.
    - `max_grad_norm`: gradients are scaled down to it if their norm over the model is larger.

    AssertionError for other types.

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
        self._set_up(
            torch.optim.Adam.__init__,
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "foreach": foreach,
                "maximize": maximize,
                "capturable": capturable,
                "differentiable": differentiable,
                "fused": fused,
            },
            {
                "loss_scaling": loss_scaling,
                "accum_type": accum_type,
                "first_order_momentum_accum_type": first_order_momentum_accum_type,
                "second_order_momentum_accum_type": second_order_momentum_accum_type,
                "max_grad_norm": max_grad_norm,
            },
        )


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay, on simulated IPUs.

    **Arguments**

    - `params`, `lr`, `betas`, `eps`, `weight_decay`: torch.optim.AdamW's.
    - `bias_correction`: whether the moments are corrected for having started at zero; True.
    - The others: those of `Adam`.

    AssertionError for accumulation types other than torch.float16 and torch.float32.

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
        self._set_up(
            torch.optim.AdamW.__init__,
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
                "foreach": foreach,
                "capturable": capturable,
                "differentiable": differentiable,
                "fused": fused,
            },
            {
                "loss_scaling": loss_scaling,
                "bias_correction": bias_correction,
                "accum_type": accum_type,
                "first_order_momentum_accum_type": first_order_momentum_accum_type,
                "second_order_momentum_accum_type": second_order_momentum_accum_type,
                "max_grad_norm": max_grad_norm,
            },
        )
