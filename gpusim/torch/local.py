"""Operations without communication: a replica computes them from its own value and its index.
They are the derivatives of collectives whose backward pass is declared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .axes import EnclosingAxis

__all__ = ["Position", "own_slice", "own_slice_transpose", "identity"]


@dataclass(frozen=True)
class Position:
    """The position of the replicas whose values are in one tensor.

    **Attributes**:

    - `lead`: how many leading dimensions the tensor has that are axes.
    - `along`: which of them is the collective's axis; None for the value of one replica.
    - `first`: the index of the first replica that is here, or of the thread's.
    - `total`: how many replicas there are.
    """

    lead: int
    along: int | None
    first: int
    total: int

    @staticmethod
    def of(lead: Sequence[int], place: int, axis: EnclosingAxis, first: int) -> Position:
        """For tensors whose leading dimensions are `lead`, for the axis at `place`."""
        along = [*lead].index(place) if place in lead else None
        return Position(len(lead), along, first, axis.total)

    def own(self, x: Tensor) -> Tensor:
        """A view of each replica's own entry along its first dimension."""
        if self.along is None:
            return x.select(self.lead, self.first)
        return x.diagonal(self.first, self.along, self.lead).movedim(-1, self.along)


def identity(x: Tensor, position: Position) -> Tensor:
    """The replica's own value. A value stored once stays so."""
    stored = x
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        stored = stored.narrow(dim, 0, 1) if stride == 0 and size > 1 else stored
    return stored.contiguous().clone().expand(x.shape)


def own_slice(x: Tensor, position: Position) -> Tensor:
    """The part of a value (replicas, *s) with the replica's own index.

    **Raises**:

    - ValueError: for another number of parts than there are replicas.
    """
    if x.shape[position.lead] != position.total:
        raise ValueError(
            f"own_slice needs a part for each of the {position.total} replicas, got shape "
            f"{tuple(x.shape[position.lead :])}"
        )
    return position.own(x).contiguous().clone()


def own_slice_transpose(x: Tensor, position: Position) -> Tensor:
    """The transpose of `own_slice`: zeros except for the part with the replica's own index."""
    whole = x.new_zeros((*x.shape[: position.lead], position.total, *x.shape[position.lead :]))
    position.own(whole).copy_(x)
    return whole
