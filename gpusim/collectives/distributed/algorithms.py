"""Folds of groups whose members lie on several instances: which algorithm each takes.

All have the bits of one fold. Selections, integers and aligned trees are folded on each instance
first; linear, reverse and ring folds are pipelined from instance to instance; two members are added
in a ring; groups that interleave instances, or are small, are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ...groups import Groups
from ...libraries import on_device
from ...runtime.world import MAIN_TAG
from ..fold import Fold
from ..kernels import FoldPart, FoldSpec, convert, copy, empty, replace_fields
from ..operand import Array, Operand, Result
from .chain import pipelined_chain
from .job import DistributedFold
from .layout import Layout, fetch
from .ranges import fold_by_ranges
from .ring import ring_fold

#: Folds of fewer bytes than this, of all members, are gathered: one message each way.
SMALL = 64 * 1024

_PIPELINED: dict[Any, Callable[[DistributedFold], Array]] = {
    "linear": pipelined_chain,
    "reverse": pipelined_chain,
    "ring": ring_fold,
}


def reduce(
    layout: Layout,
    x: Operand,
    groups: Groups | None,
    fold: Fold,
    *,
    mean: bool = False,
    cut_axis: int | None = None,
) -> Result:
    """The fold of each group, for its local members; `mean` divides it by the group's size.

    `cut_axis` is for rings in phases.
    """
    offsets = fold.offsets(x)
    if groups is None:
        everyone = tuple(range(layout.size))
        return Result(_fold(layout, x, everyone, fold, offsets, mean, cut_axis), False)
    out = empty(x[0], (len(layout.local), *x.batch_shape, *x.shape))
    received: list[tuple[Array, Array]] = []
    for number, members in enumerate(groups.members):
        here = [m for m in members if layout.instance_of[m] == layout.instance]
        if here:
            at = offsets * groups.group_count + number
            value = _fold(layout, x, members, fold, at, mean, cut_axis)
            received += [(out[int(layout.position[m]), ...], value) for m in here]
    copy(received)
    return Result(out, True)


def _fold(
    layout: Layout,
    x: Operand,
    members: tuple[int, ...],
    fold: Fold,
    offsets: Any,
    mean: bool,
    cut_axis: int | None,
) -> Array:
    r"""The fold of one group, (\*batch, \*value), on each instance that holds members of it."""
    here = [x[int(layout.position[m])] for m in members if layout.instance_of[m] == layout.instance]
    spec = replace_fields(fold.spec, divisor=len(members)) if mean else fold.spec
    if cut_axis is not None:
        spec = replace_fields(spec, cut_axis=cut_axis)
    job = DistributedFold(
        layout, members, here, spec, fold.by_engine, fold.call, offsets, x.batch_ndim
    )
    return _algorithm(job)(job)


def _algorithm(job: DistributedFold) -> Callable[[DistributedFold], Array]:
    if len(job.instances) == 1:
        return _by_single_instance
    if job.engine:
        return _by_engine
    if job.like.nbytes * len(job.members) <= SMALL or job.spec.in_phases:
        return _fold_gathered
    if _associative(job):
        return _fold_associative
    if len(job.members) == 2 and job.order in ("linear", "reverse", "tree"):
        return _fold_pair
    if job.order == "tree" and _aligned(job):
        return _fold_subtrees
    if job.runs is not None and not _lacks_tags(job):
        return _PIPELINED.get(job.order, fold_by_ranges)
    return fold_by_ranges


def _lacks_tags(job: DistributedFold) -> bool:
    """Whether the instances have to begin their exchanges in one order.

    NCCL knows no tags: what is received ahead would hold up what is to be sent first.
    """
    return on_device(job.like)


def _associative(job: DistributedFold) -> bool:
    """Whether the result is the same whatever is folded first."""
    selects = job.op in ("max", "min", "logical_and", "logical_or")
    return selects or job.like.dtype.kind in "biu"


def _aligned(job: DistributedFold) -> bool:
    """Whether each instance holds a whole subtree."""
    if job.runs is None:
        return False
    *counts, last = (end - first for first, end in job.runs)
    size = counts[0]
    return size & (size - 1) == 0 and all(count == size for count in counts) and last <= size


def _by_single_instance(job: DistributedFold) -> Array:
    return job.fold(job.values)


def _fold_gathered(job: DistributedFold) -> Array:
    """All members come here."""
    layout, among = job.layout, np.array(sorted(job.members))
    needs = [
        among if instance in job.instances else among[:0]
        for instance in range(layout.world.instances)
    ]
    here = [m for m in job.members if layout.instance_of[m] == layout.instance]
    gathered = fetch(layout, dict(zip(here, job.values, strict=True)), needs, job.like)
    return job.fold(gathered[np.searchsorted(among, job.members)])


def _by_engine(job: DistributedFold) -> Array:
    """The engine's own sum of the instances' sums: fastest, and with its own bits."""
    # Threads would come to the engine in an order of their own on each instance.
    threads = job.layout.tag != MAIN_TAG
    if threads or len(job.instances) < job.layout.world.instances:
        linear = replace(job, engine=False)
        return _algorithm(linear)(linear)
    total = job.like
    if len(job.values) > 1:
        total = job.fold(job.values, replace_fields(job.spec, divisor=None))
    if job.like.dtype.itemsize <= 2 and not _associative(job):
        total = convert(total, np.float32)
    total = job.layout.engine.all_reduce(total, job.op)
    if job.spec.divisor is not None:
        total = np.divide(total, job.spec.divisor, out=total)
    return convert(total, job.like.dtype)


def _fold_associative(job: DistributedFold) -> Array:
    """One partial result from each instance, which any order gives the same bits: a ring spreads
    the work."""
    part = None if job.op.startswith("logical") else FoldPart(final=False)
    return _combine_partials(job, replace_fields(job.spec, order="linear"), part, order="ring")


def _fold_pair(job: DistributedFold) -> Array:
    """One addition, which is the same in each order: in a ring each instance does half of it."""
    ring = replace(job, spec=replace_fields(job.spec, order="ring"))
    return fold_by_ranges(ring) if _lacks_tags(job) else ring_fold(ring)


def _fold_subtrees(job: DistributedFold) -> Array:
    """One subtree from each instance; its additions are numbered as the whole tree's."""
    assert job.runs is not None
    total = len(job.members)
    first, end = job.runs[0]
    level = (end - first).bit_length() - 1
    part = FoldPart(final=False, nodes=(0, job.runs[job.rank][0], total))
    if len(job.instances) == 2 and not job.stochastic:  # the last addition, and no step in it
        return _combine_partials(job, job.spec, part, order="ring")
    return _combine_partials(job, job.spec, part, nodes=(level, 0, total))


def _combine_partials(
    job: DistributedFold,
    spec: FoldSpec,
    part: FoldPart | None,
    *,
    order: str | None = None,
    nodes: tuple[int, int, int] | None = None,
) -> Array:
    """Fold the local members, then the partial results as if they were the members."""
    partial = job.values[0]
    if len(job.values) > 1 or partial.dtype != job.partial:  # a single one is not rounded
        final = part is None or part.final
        partial = job.fold(
            job.values, spec if final else replace_fields(spec, divisor=None), part=part
        )
    firsts = tuple(job.members[job.instance_of.tolist().index(i)] for i in job.instances)
    spec = replace_fields(job.spec, out_dtype=job.like.dtype)
    if order is not None:
        spec = replace_fields(spec, order=order)
    combine = fold_by_ranges if _lacks_tags(job) else _PIPELINED.get(spec.order, fold_by_ranges)
    return combine(replace(job, members=firsts, values=[partial], spec=spec, nodes=nodes))
