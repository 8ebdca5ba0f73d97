"""RMSprop, as torch.optim.RMSprop or as TensorFlow's, with PopTorch's accumulators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .base import Optimizer

__all__ = ["RMSprop"]


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop on simulated IPUs.

    **Arguments**

    - `params`, `lr`, `alpha`, `eps`, `weight_decay`, `momentum`, `centered`: torch.optim.RMSprop's;
      `centered` must be the same for all groups.
    - `foreach`, `maximize`, `differentiable`: accepted; a model on IPUs ignores them.
    - `loss_scaling`: what the loss is multiplied by before the backward pass.
    - `accum_type`, `first_order_momentum_accum_type`, `second_order_momentum_accum_type`:
      torch.float16 or torch.float32, that of accumulated gradients, of the average of their
      squares, and of their own average, which there is if `centered`.
    - `use_tf_variant`: TensorFlow's: the average of the squares starts at 1, `eps` is added inside
      the root, and the momentum adds up steps that are already multiplied by `lr`.

    AssertionError for other types.

    >>> import torch
    >>> RMSprop([torch.nn.Parameter(torch.ones(2))], use_tf_variant=True).use_tf_variant
    True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        alpha: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        centered: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        use_tf_variant: bool | None = None,
    ) -> None:
        self._set_up(
            torch.optim.RMSprop.__init__,
            params,
            {
                "lr": lr,
                "alpha": alpha,
                "eps": eps,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "centered": centered,
                "foreach": foreach,
                "maximize": maximize,
                "differentiable": differentiable,
            },
            {
                "loss_scaling": loss_scaling,
                "accum_type": accum_type,
                "first_order_momentum_accum_type": first_order_momentum_accum_type,
                "second_order_momentum_accum_type": second_order_momentum_accum_type,
                "use_tf_variant": use_tf_variant,
            },
        )
