"""One group's fold: its members, those of them that are here, and how they are folded.
Values are seen as rows of elements, in blocks of the size that is exchanged at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from fallback import partial_dtype
from fallback.schedules import Order

from ..kernels import empty, kernels
from ..operand import Array, Operand
from .spread import Numbers, Spread

#: Elements of a value that are exchanged at a time, while those before are folded.
BLOCK = 256 * 1024
#: Blocks that are on their way at once.
AHEAD = 3


@dataclass(frozen=True)
class Task:
    """The fold of one group.

    Attributes:
        spread: where all members of the collective are.
        members: the group's, in its order.
        values: those of them that are here, (batch, *value) each, in the group's order.
        how: the fold's op, order, accumulate, rounding, seed and call.
        divisor: of a mean.
        places: of the batch entries.
        batch_ndim: how many axes of the values are batch axes.
    """

    spread: Spread
    members: tuple[int, ...]
    values: list[Array]
    how: dict[str, Any]
    divisor: int | None
    places: Any
    batch_ndim: int

    @classmethod
    def of(
        cls,
        spread: Spread,
        operand: Operand,
        members: tuple[int, ...],
        places: Any,
        how: dict[str, Any],
        *,
        mean: bool = False,
    ) -> Task:
        here = [operand[int(spread.position[m])] for m in members if spread.owner[m] == spread.own]
        divisor = len(members) if mean else None
        return cls(spread, members, here, how, divisor, places, operand.batch_ndim)

    @property
    def order(self) -> Order:
        order: Order = self.how.get("order", "linear")
        return order

    @property
    def op(self) -> str:
        op: str = self.how["op"]
        return op

    @property
    def stochastic(self) -> bool:
        return self.how.get("rounding") == "stochastic" and self.like.dtype.kind not in "biuc"

    @property
    def like(self) -> Array:
        """Any of the values."""
        return self.values[0]

    @property
    def whole(self) -> dict[str, Any]:
        """The arguments of a fold of all members."""
        return {**self.how, "divisor": self.divisor, "places": self.places}

    @cached_property
    def owners(self) -> Numbers:
        """The instance of each member."""
        return self.spread.owner[list(self.members)]

    @cached_property
    def instances(self) -> list[int]:
        """Those that hold members, in the order in which the group meets them."""
        return list(dict.fromkeys(self.owners.tolist()))

    @cached_property
    def runs(self) -> list[tuple[int, int]] | None:
        """The positions (first, end) that each of `instances` holds; None unless all are runs."""
        edges = [0, *(np.flatnonzero(np.diff(self.owners)) + 1).tolist(), len(self.members)]
        return None if len(edges) - 1 > len(self.instances) else list(pairwise(edges))

    @property
    def turn(self) -> int:
        """Which of `instances` this one is."""
        return self.instances.index(self.spread.own)

    @property
    def partial(self) -> np.dtype[Any]:
        return partial_dtype(self.like.dtype, self.how.get("accumulate"), self.op)

    def kernel(self, members: Any, **arguments: Any) -> Array:
        return kernels(self.like).fold(members, **arguments)

    def kernel_into(self, target: Array, members: Any, **arguments: Any) -> Array:
        """Fold into a part of a result; returns it in contiguous memory."""
        if target.flags.c_contiguous:
            return self.kernel(members, out=target, **arguments)
        part = self.kernel(members, **arguments)
        target[...] = part
        return part


def flat(task: Task, array: Array) -> Array:
    """(batch entries, elements) where elements are told apart; else (1, all of them)."""
    # Orders that may cut a value into blocks do so in each entry.
    apart = task.stochastic or task.order not in ("linear", "reverse", "tree", "engine")
    entries = math.prod(array.shape[: task.batch_ndim]) if apart else 1
    return array.reshape(entries, -1) if array.size else array.reshape(entries, 0)


def places_of(task: Task) -> Any:
    """Of the rows of `_flat`."""
    if not task.stochastic:
        return 0
    shape = task.like.shape[: task.batch_ndim]
    return np.broadcast_to(np.asarray(task.places), shape).reshape(-1)


def new_result(task: Task) -> Array:
    return empty(task.like, task.like.shape, task.how.get("out_dtype"))


def blocks_of(first: int, end: int, rows: int) -> list[tuple[int, int]]:
    """A range of elements in blocks of about the size that is exchanged at a time."""
    step = max(1, BLOCK // max(1, rows))
    count = max(1, -(-(end - first) // step))
    return [
        (first + (end - first) * k // count, first + (end - first) * (k + 1) // count)
        for k in range(count)
    ]
