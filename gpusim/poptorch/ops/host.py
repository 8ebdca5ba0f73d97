"""gpusim::on_host: Python functions that a graph calls on the host, one replica after the other.

Their results have no gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import torch as gt
from ...torch.stacked import batched
from ..axis import AXIS, inside_replicas

__all__ = ["HOST", "HostFunction", "Like", "on_host", "only_where", "replica_index"]


class Like(NamedTuple):
    """A shape and a dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class HostFunction(NamedTuple):
    """A function that runs on the host.

    **Attributes**:

    - `likes`: the shapes and dtypes of the results, from those of the operands and the arguments.
    - `compute`: the results of one replica, from its operands and the arguments; on the CPU.
    """

    likes: Callable[[Sequence[Like], dict[str, Any]], list[Like]]
    compute: Callable[[list[Tensor], dict[str, Any]], list[Tensor]]


HOST: dict[str, HostFunction] = {}
"""The functions, by name."""


def on_host(name: str, operands: Sequence[Tensor], **arguments: Any) -> list[Tensor]:
    """Call a function of `HOST`, for each replica, when the graph runs.

    **Arguments**:

    - `name`: of the function.
    - `operands`: of this replica.
    - `arguments`: values that JSON can represent.
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


# ---------------------------------------------------------------- the replica

_condition: ContextVar[Tensor | None] = ContextVar("gpusim condition", default=None)


def replica_index() -> Tensor:
    """The index of the replica, or -1 if the branch of `cond` that runs is not the replica's.

    >>> replica_index()
    tensor(0)
    """
    index = gt.axis_index(AXIS).long() if inside_replicas() else torch.zeros((), dtype=torch.int64)
    condition = _condition.get()
    if condition is None:
        return index
    index = index.to(condition.device)
    return torch.where(condition, index, torch.full_like(index, -1))


@contextmanager
def only_where(condition: Tensor) -> Iterator[None]:
    """Run code inside the block for the replicas where a boolean tensor is true.

    Replicas in lockstep all run both branches of `cond`; side effects need this condition.
    """
    around = _condition.get()
    token = _condition.set(condition if around is None else around & condition)
    try:
        yield
    finally:
        _condition.reset(token)
