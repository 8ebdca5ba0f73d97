"""Collectives in which nobody waits: what a replica makes of its own value and of where it stands.
They are what collectives turn to whose backward pass is declared, and is not their transpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .frames import Around

__all__ = ["Stand", "own_slice", "own_slice_back", "same"]


@dataclass(frozen=True)
class Stand:
    """Where replicas stand whose values are in one tensor.

    Attributes:
        lead: how many leading dimensions the tensor has that are axes.
        along: which of them is the collective's axis; None for the value of one replica.
        first: the index of the first replica that is here, or of the thread's.
        total: how many replicas there are.
    """

    lead: int
    along: int | None
    first: int
    total: int

    @staticmethod
    def of(lead: Sequence[int], place: int, axis: Around, first: int) -> Stand:
        """Of tensors whose leading dimensions are `lead`, for the axis at `place`."""
        along = [*lead].index(place) if place in lead else None
        return Stand(len(lead), along, first, axis.total)

    def own(self, x: Tensor) -> Tensor:
        """A view: of each replica's first dimension, its own index."""
        if self.along is None:
            return x.select(self.lead, self.first)
        return x.diagonal(self.first, self.along, self.lead).movedim(-1, self.along)


def same(x: Tensor, stand: Stand) -> Tensor:
    """The replica's own value. What is in memory once stays so."""
    once = x
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        once = once.narrow(dim, 0, 1) if stride == 0 and size > 1 else once
    return once.contiguous().clone().expand(x.shape)


def own_slice(x: Tensor, stand: Stand) -> Tensor:
    """Of a value (replicas, *s) the part with the replica's own index.

    Raises:
        ValueError: for another number of parts than there are replicas.
    """
    if x.shape[stand.lead] != stand.total:
        raise ValueError(
            f"own_slice needs a part for each of the {stand.total} replicas, got shape "
            f"{tuple(x.shape[stand.lead :])}"
        )
    return stand.own(x).contiguous().clone()


def own_slice_back(x: Tensor, stand: Stand) -> Tensor:
    """The transpose of `own_slice`: zeros, but for the part with the replica's own index."""
    whole = x.new_zeros((*x.shape[: stand.lead], stand.total, *x.shape[stand.lead :]))
    stand.own(whole).copy_(x)
    return whole
