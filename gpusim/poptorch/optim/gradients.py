"""Gradients before an update: norms, clipping, and automatic loss scaling.

Tensors have a leading axis for the groups of replicas that share a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["adjust_loss_scaling", "clip", "norms", "per_group"]


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The Euclidean norms of each tensor, one for each group: the same bits as group by group."""
    parts = [part for tensor in tensors for part in tensor.unbind(0)]
    found = iter(torch._foreach_norm(parts))
    return [torch.stack([next(found) for _ in range(len(tensor))]) for tensor in tensors]


def per_group(factors: Tensor, tensor: Tensor) -> Tensor:
    """One factor for each group, in a shape that multiplies the tensor."""
    return factors.view(-1, *[1] * (tensor.dim() - 1))


def clip(
    gradients: Mapping[str, Tensor],
    max_norm: float,
    members: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Tensor]:
    """Scale gradients down so that no replica's model has a norm of more than `max_norm`.

    A parameter of replicas with different norms, because other parameters differ among them, is
    scaled for the largest of those.

    **Arguments**

    - `gradients`: float32, by parameter.
    - `max_norm`: the largest norm over all of a replica's gradients.
    - `members`: the group that each replica is in, by parameter. Groups of parameters that it does
      not name are neighbours.

    >>> import torch
    >>> clip({"a": torch.tensor([[3.0]]), "b": torch.tensor([[4.0]])}, 1.0)
    {'a': tensor([[0.6000]]), 'b': tensor([[0.8000]])}
    """
    if not gradients:
        return {}
    squares = dict(zip(gradients, (norm**2 for norm in norms([*gradients.values()])), strict=True))
    groups = {name: len(square) for name, square in squares.items()}
    known = dict(members or {})
    replicas = len(next(iter(known.values()))) if known else math.lcm(*groups.values())
    indices = {
        name: torch.as_tensor(
            known.get(name, consecutive(count, replicas)), device=squares[name].device
        )
        for name, count in groups.items()
    }
    totals = sum((squares[name][indices[name]] for name in groups), torch.zeros(()))
    assert isinstance(totals, Tensor)
    factors = max_norm / totals.sqrt().clamp(min=max_norm)
    found = {}
    for name, gradient in gradients.items():
        least = factors.new_ones(groups[name])
        least = least.scatter_reduce(0, indices[name], factors, "amin")
        found[name] = gradient * per_group(least, gradient)
    return found


def consecutive(groups: int, replicas: int) -> list[int]:
    """The group of each replica, where groups are neighbours.

    >>> consecutive(2, 4)
    [0, 0, 1, 1]
    """
    return [replica * groups // replicas for replica in range(replicas)]


# ---------------------------------------------------------------- automatic loss scaling

EDGE = 0.0625  # of the largest finite value of the gradient's type: four doublings below it
ABOVE = 1e-7  # of all values
LARGEST = 2.0**15  # of a loss scaling: the largest power of two that float16 holds


def adjust_loss_scaling(
    gradients: Sequence[Tensor], factor: float, loss_scaling: float
) -> tuple[float, bool]:
    """The loss scaling factor for the next step, and whether these gradients are finite.

    The factor is halved if more than one value in ten million is beyond the edge, else doubled.

    **Arguments**

    - `gradients`: of the scaled loss, of any floating-point types.
    - `factor`: what they were scaled by, times `loss_scaling`. The product grows to 32768 at most.

    >>> import torch
    >>> adjust_loss_scaling([torch.tensor([3.0], dtype=torch.float16)], 4.0, 1.0)
    (8.0, True)
    >>> adjust_loss_scaling([torch.tensor([50000.0, 1.0], dtype=torch.float16)], 4.0, 1.0)
    (2.0, True)
    """
    if not gradients:
        return factor, True
    largest = [float(norm) for norm in torch._foreach_norm(list(gradients), math.inf)]
    beyond = 0
    for gradient, most in zip(gradients, largest, strict=True):
        edge = EDGE * torch.finfo(gradient.dtype).max
        if not most <= edge:  # also where there is a NaN
            beyond += gradient.numel() - int((gradient.abs() <= edge).sum())
    finite = all(math.isfinite(most) for most in largest)
    if beyond > ABOVE * sum(gradient.numel() for gradient in gradients):
        return factor / 2, finite
    return max(factor, min(factor * 2, LARGEST / abs(loss_scaling))), finite
