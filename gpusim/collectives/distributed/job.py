"""The fold of one group as a job for the algorithms: its members, the local ones, and the fold.
Values are seen as rows of elements, in blocks of the size that is exchanged at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from gpusim.fallback import partial_dtype
from gpusim.fallback.orders import COMPENSATED, EXACT
from gpusim.fallback.schedules import Order

from ...libraries import call_on_bits
from ..kernels import FoldPart, FoldSpec, copy, empty, run_fold
from ..operand import Array
from .layout import Layout, Numbers

#: Elements of a value that are exchanged at a time, while those before are folded.
BLOCK = 256 * 1024
#: The number of blocks in flight.
PREFETCH = 3


@dataclass(frozen=True)
class DistributedFold:
    r"""The fold of one group.

    **Attributes**

    - `layout`: where all members of the collective are.
    - `members`: the group's, in its order.
    - `values`: the local ones, (batch, \*value) each, in the group's order.
    - `spec`: how all members are folded; a mean's divisor is the group's size.
    - `engine`: whether the engine may add in its own order.
    - `call`, `offsets`: the counters of random bits; `offsets` are those of the batch entries.
    - `batch_ndim`: how many axes of the values are batch axes.
    - `nodes`: where the members are in a larger tree; see `fallback.fold`.
    """

    layout: Layout
    members: tuple[int, ...]
    values: list[Array]
    spec: FoldSpec
    engine: bool
    call: int
    offsets: Any
    batch_ndim: int
    nodes: tuple[int, int, int] | None = None

    @property
    def order(self) -> Order:
        return self.spec.order

    @property
    def op(self) -> str:
        return self.spec.op

    @property
    def stochastic(self) -> bool:
        return self.spec.rounding == "stochastic" and self.like.dtype.kind not in "biuc"

    @property
    def like(self) -> Array:
        """Any of the values."""
        return self.values[0]

    @cached_property
    def instance_of(self) -> Numbers:
        """The instance of each member."""
        return self.layout.instance_of[list(self.members)]

    @cached_property
    def instances(self) -> list[int]:
        """Those that hold members, in the order in which the group meets them."""
        return list(dict.fromkeys(self.instance_of.tolist()))

    @cached_property
    def runs(self) -> list[tuple[int, int]] | None:
        """The positions (first, end) that each of `instances` holds; None unless all are runs."""
        edges = [0, *(np.flatnonzero(np.diff(self.instance_of)) + 1).tolist(), len(self.members)]
        return None if len(edges) - 1 > len(self.instances) else list(pairwise(edges))

    @property
    def rank(self) -> int:
        """The position of this instance among `instances`."""
        return self.instances.index(self.layout.instance)

    @property
    def partial(self) -> np.dtype[Any]:
        return partial_dtype(self.like.dtype, self.spec.accumulate, self.op)

    def fold(
        self,
        members: Any,
        spec: FoldSpec | None = None,
        *,
        batch_ndim: int | None = None,
        offsets: Any = None,
        part: FoldPart | None = None,
        out: Array | None = None,
    ) -> Array:
        """Fold members, by the job's own spec unless another is given.

        `out` may be a part of a result that is not contiguous; returned is contiguous memory.
        """
        spec = self.spec if spec is None else spec
        direct = out is not None and out.flags.c_contiguous
        folded = run_fold(
            spec,
            members,
            batch_ndim=self.batch_ndim if batch_ndim is None else batch_ndim,
            call=self.call,
            batch_offset=self.offsets if offsets is None else offsets,
            part=part,
            out=out if direct else None,
        )
        if out is not None and not direct:
            copy([(out, folded)])
        return folded


def flat(job: DistributedFold, array: Array) -> Array:
    """(batch entries, elements) if elements are distinguished by their index; else (1, all)."""
    # Orders that may cut a value into blocks do so in each entry.
    alike = ("linear", "reverse", "tree", *COMPENSATED, EXACT)
    apart = job.stochastic or job.order not in alike
    entries = math.prod(array.shape[: job.batch_ndim]) if apart else 1
    rows: Array = call_on_bits(np.reshape, array, (entries, -1 if array.size else 0))
    return rows


def row_offsets(job: DistributedFold) -> Any:
    """The batch offsets of the rows of `flat`."""
    if not job.stochastic:
        return 0
    shape = job.like.shape[: job.batch_ndim]
    return np.broadcast_to(np.asarray(job.offsets), shape).reshape(-1)


def new_result(job: DistributedFold) -> Array:
    return empty(job.like, job.like.shape, job.spec.out_dtype)


def blocks_of(first: int, end: int, rows: int) -> list[tuple[int, int]]:
    """A range of elements in blocks of about the size that is exchanged at a time."""
    step = max(1, BLOCK // max(1, rows))
    count = max(1, -(-(end - first) // step))
    return [
        (first + (end - first) * k // count, first + (end - first) * (k + 1) // count)
        for k in range(count)
    ]
