"""Norms, for each group of replicas: the leading axis of a parameter is that of its groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["along", "clipped", "norms"]


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The Euclidean norm of each tensor, one for each group: the same bits as group by group."""
    parts = [part for tensor in tensors for part in tensor.unbind(0)]
    found = iter(torch._foreach_norm(parts))
    return [torch.stack([next(found) for _ in range(len(tensor))]) for tensor in tensors]


def along(factors: Tensor, tensor: Tensor) -> Tensor:
    """One factor for each group, as something to multiply the tensor by."""
    return factors.view(-1, *[1] * (tensor.dim() - 1))


def clipped(
    gradients: Mapping[str, Tensor],
    max_norm: float,
    members: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Tensor]:
    """The gradients, scaled down so that no replica's model has a norm of more than `max_norm`.

    **Arguments**

    - `gradients`: float32, with a leading axis for the groups of replicas.
    - `max_norm`: the largest norm over all of a replica's gradients; infinity for none.
    - `members`: the group that each replica is in, by parameter; of parameters that are not in it,
      groups are of neighbours.

    A parameter of replicas with different norms, because other parameters differ among them, is
    scaled for the largest of those.

    >>> import torch
    >>> clipped({"a": torch.tensor([[3.0]]), "b": torch.tensor([[4.0]])}, 1.0)
    {'a': tensor([[0.6000]]), 'b': tensor([[0.8000]])}
    """
    if math.isinf(max_norm) or not gradients:
        return dict(gradients)
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
        found[name] = gradient * along(least, gradient)
    return found


def consecutive(groups: int, replicas: int) -> list[int]:
    """The group of each replica, where groups are neighbours.

    >>> consecutive(2, 4)
    [0, 0, 1, 1]
    """
    return [replica * groups // replicas for replica in range(replicas)]
