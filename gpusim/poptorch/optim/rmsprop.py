"""RMSprop, torch's or TensorFlow's: the optimizer, its update rule and its numbers for PopART."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .adam import LEARNING_RATE_AND_DECAY
from .optimizer import Optimizer
from .rule import Batch, Exported, Slot
from .sgd import has_momentum

__all__ = ["RMSprop", "RMSpropRule"]


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop on simulated IPUs.

    **Arguments**

    - `params`, `lr`, `alpha`, `eps`, `weight_decay`, `momentum`, `centered`: torch.optim.RMSprop's;
      `centered` must be the same for all groups.
    - `foreach`, `maximize`, `differentiable`: accepted; a model on IPUs ignores them.
    - `loss_scaling`: the factor of the loss in the backward pass.
    - `accum_type`, `first_order_momentum_accum_type`, `second_order_momentum_accum_type`:
      torch.float16 or torch.float32, that of accumulated gradients, of the average of their
      squares, and of their own average, which there is if `centered`.
    - `use_tf_variant`: TensorFlow's: the average of the squares starts at 1, `eps` is added inside
      the root, and the momentum adds up steps that are already multiplied by `lr`.

    **Raises**: AssertionError for other types.

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
        self._set_up(torch.optim.RMSprop.__init__, locals())


class RMSpropRule:
    """Accl1 is the average of squares, Accl2 that of gradients if centred, Accl3 the momentum."""

    elementwise = True

    def __init__(
        self, types: tuple[torch.dtype, torch.dtype], centered: bool, tensorflow: bool
    ) -> None:
        self.types = types
        self.centered = centered
        self.tensorflow = tensorflow

    def slots(self, values: dict[str, Any], constant: set[str]) -> dict[str, Slot]:
        first, second = self.types
        found = {"Accl1": Slot(first, torch.ones_like if self.tensorflow else torch.zeros_like)}
        if self.centered:
            found["Accl2"] = Slot(second)
        if has_momentum(values, constant):
            found["Accl3"] = Slot()
        return found

    def update(self, batch: Batch) -> None:
        lr = batch.values["lr"]
        gradients = batch.decayed()
        self.average(batch, gradients)
        roots = self.denominators(batch)
        if "Accl3" not in batch.slots:
            torch._foreach_addcdiv_(batch.weights, gradients, roots, -lr)
            return
        momenta = batch.slots["Accl3"]
        torch._foreach_mul_(momenta, batch.values["momentum"])
        torch._foreach_addcdiv_(momenta, gradients, roots, lr if self.tensorflow else 1.0)
        batch.store("Accl3")
        torch._foreach_add_(batch.weights, momenta, alpha=-1.0 if self.tensorflow else -lr)

    def average(self, batch: Batch, gradients: list[Tensor]) -> None:
        """Add the gradients to the averages."""
        alpha = batch.values["alpha"]
        squares = batch.slots["Accl1"]
        torch._foreach_mul_(squares, alpha)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - alpha)
        batch.store("Accl1")
        if self.centered:
            torch._foreach_lerp_(batch.slots["Accl2"], gradients, 1 - alpha)
            batch.store("Accl2")

    def denominators(self, batch: Batch) -> list[Tensor]:
        """The root of the average, or of the variance if centred, with `eps` inside or outside."""
        eps, squares = batch.values["eps"], batch.slots["Accl1"]
        if self.centered:
            means = batch.slots["Accl2"]
            roots = list(torch._foreach_addcmul(squares, means, means, -1.0))
        else:
            roots = [square.clone() for square in squares]
        if self.tensorflow:
            torch._foreach_add_(roots, eps)
        torch._foreach_sqrt_(roots)
        if not self.tensorflow:
            torch._foreach_add_(roots, eps)
        return roots


EXPORTED: tuple[Exported, ...] = (
    *LEARNING_RATE_AND_DECAY,
    ("adaptiveAlpha", ("alpha",), lambda alpha: alpha),
    ("adaptiveMomentum", ("momentum",), lambda momentum: momentum),
    ("adaptiveEps", ("eps",), lambda eps: eps),
)
