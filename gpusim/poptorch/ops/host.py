"""gpusim::on_host: what a graph has computed on the host, one replica after the other, by Python.
What it gives has no gradient."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...torch.stacked import batched

__all__ = ["HOST", "Host", "Like", "on_host"]


class Like(NamedTuple):
    """A shape and a dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Host(NamedTuple):
    """Something that is computed on the host.

    Attributes:
        likes: what the results are like, of what the operands are like and the arguments.
        compute: the results of one replica, of its operands and the arguments; all on the CPU.
    """

    likes: Callable[[Sequence[Like], dict[str, Any]], list[Like]]
    compute: Callable[[list[Tensor], dict[str, Any]], list[Tensor]]


HOST: dict[str, Host] = {}
"""All of it, by name."""


def on_host(name: str, operands: Sequence[Tensor], **arguments: Any) -> list[Tensor]:
    """Compute it, for each replica, where the graph runs.

    Args:
        name: in `HOST`.
        operands: of this replica.
        arguments: what JSON can say.
    """
    detached = [x.detach() for x in operands]
    found: list[Tensor] = torch.ops.gpusim.on_host.default(detached, name, json.dumps(arguments), 0)
    return found


@torch.library.custom_op(
    "gpusim::on_host",
    mutates_args=(),
    schema="(Tensor[] operands, str name, str arguments, int lead) -> Tensor[]",
)
def _on_host(operands: list[Tensor], name: str, arguments: str, lead: int) -> list[Tensor]:
    """The results, with the `lead` leading dimensions of the operands."""
    likes, sizes = _likes(operands, name, arguments, lead)
    found = [torch.zeros((*sizes, *like.shape), dtype=like.dtype) for like in likes]
    own = [x.detach().cpu() for x in operands]
    for place in product(*map(range, sizes)):
        results = HOST[name].compute([x[place].clone() for x in own], json.loads(arguments))
        for whole, result in zip(found, results, strict=True):
            whole[place] = result
    device = operands[0].device
    return [x.to(device) for x in found]


@_on_host.register_fake
def _fake(operands: list[Tensor], name: str, arguments: str, lead: int) -> list[Tensor]:
    likes, sizes = _likes(operands, name, arguments, lead)
    return [operands[0].new_empty((*sizes, *like.shape), dtype=like.dtype) for like in likes]


@_on_host.register_vmap
def _vmap(
    info: Any, in_dims: Any, operands: list[Tensor], name: str, arguments: str, lead: int
) -> tuple[list[Tensor], list[int]]:
    dims = in_dims[0]
    whole = [batched(x, dim, info.batch_size) for x, dim in zip(operands, dims, strict=True)]
    results = _on_host(whole, name, arguments, lead + 1)
    return results, [0] * len(results)


def _likes(
    operands: Sequence[Tensor], name: str, arguments: str, lead: int
) -> tuple[list[Like], tuple[int, ...]]:
    likes = [Like(tuple(x.shape[lead:]), x.dtype) for x in operands]
    return HOST[name].likes(likes, json.loads(arguments)), tuple(operands[0].shape[:lead])
