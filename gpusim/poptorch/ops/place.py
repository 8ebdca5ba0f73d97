"""Which replica an operation is of, and whether what it does is to be done at all: code of `cond`
runs for all replicas, and counts for some."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from ... import torch as gt
from ..axis import AXIS, inside_replicas

__all__ = ["only_where", "place"]

_condition: ContextVar[Tensor | None] = ContextVar("gpusim where code of cond counts", default=None)


def place() -> Tensor:
    """The replica's index, or -1 where the code that runs does not count.

    >>> place()
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
    """A block that counts only where a boolean tensor is true, and what is around it counts."""
    around = _condition.get()
    token = _condition.set(condition if around is None else around & condition)
    try:
        yield
    finally:
        _condition.reset(token)
