"""Folds whose wire has no scale, by one compiled kernel: each element is rounded by itself.
Other folds with a wire, and those without such a kernel, are `fallback.sends`'s."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import kernels
from .fold_kernels import compiled_folds
from .members import Members
from .orders import COMPENSATED, EXACT, FIXED
from .plan import SentPlan, plan_fold
from .schedules import Binary, Schedule
from .spec import FoldSpec


def fold_compiled(
    spec: FoldSpec,
    group: Members,
    batch_ndim: int,
    call: int,
    offsets: NDArray[np.uint64],
    out: NDArray[Any],
) -> bool:
    """Fold a group into `out`, as members receive it. False: nothing is done.

    `spec` has a wire and no groups, and does not divide members. `offsets` are the batch's.
    """
    compiled = compiled_folds()
    if compiled is None or len(group.strides) != 1:
        return False
    if out.size * group.count < kernels.least_work() or not out.size:
        return False
    plan = _plan(spec, group.dtype, group.count, group.shape, batch_ndim)
    kernel = None if plan is None else compiled.plan_sent(plan, group.strides[0])
    if kernel is None:
        return False
    kernel(group, None, out, call, offsets)
    return True


@lru_cache(maxsize=512)
def _plan(
    spec: FoldSpec, dtype: np.dtype[Any], count: int, shape: tuple[int, ...], batch_ndim: int
) -> SentPlan | None:
    """The plan; None for a fold that rounds blocks or nothing on its way, or has one member."""
    wire = spec.wire
    if wire is None or wire.scale is not None or count == 1 or spec.order == FIXED:
        return None
    plan = plan_fold(spec.plain, None, dtype, count, shape, batch_ndim)
    if plan.order in (EXACT, *COMPENSATED) or not (wire.at_hops or wire.at_members):
        return None
    return SentPlan(
        plan, wire, sends_first(spec, count, plan.total, dtype), wire.at_result and spec.gathered
    )


def sends_first(spec: FoldSpec, members: int, elements: int, dtype: np.dtype[Any]) -> bool:
    """Whether, of two values that are added in a graph, the first is sent: the child's."""
    order = spec.order
    if not isinstance(order, Schedule):
        return False
    return isinstance(order.fold_of(members, elements, dtype.itemsize), Binary)
