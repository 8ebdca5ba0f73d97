"""The ways to fold a group whose members lie on several instances, all with the bits of one fold.

Selections, integers and aligned trees are folded on each instance first; linear, reverse and ring
folds are passed on from instance to instance; what interleaves instances, or is small, is gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ...libraries import on_device
from ...runtime.world import MAIN_TAG
from ..operand import Array
from .chain import passed_on
from .ring import around_the_ring
from .spread import fetch
from .task import Task
from .windows import by_windows

#: Folds of fewer bytes than this, of all members, are gathered: one message each way.
SMALL = 64 * 1024

_PASSED_ON: dict[Any, Callable[[Task], Array]] = {
    "linear": passed_on,
    "reverse": passed_on,
    "ring": around_the_ring,
}


def fold(task: Task) -> Array:
    """The fold of the group, (*batch, *value), on each instance that holds members of it."""
    return _way(task)(task)


def _way(task: Task) -> Callable[[Task], Array]:
    if len(task.instances) == 1:
        return _at_home
    if task.order == "engine":
        return _by_engine
    if task.like.nbytes * len(task.members) <= SMALL:
        return _gathered
    if _associative(task):
        return _partials_of_any_order
    if task.order == "tree" and _aligned(task):
        return _partials_of_trees
    if task.runs is not None and not _in_step(task):
        return _PASSED_ON.get(task.order, by_windows)
    return by_windows


def _in_step(task: Task) -> bool:
    """Whether the instances have to begin their exchanges in one order.

    NCCL knows no tags: what is received ahead would hold up what is to be sent first.
    """
    return on_device(task.like)


def _associative(task: Task) -> bool:
    """Whether the result is the same whatever is folded first."""
    selects = task.op in ("max", "min", "logical_and", "logical_or")
    return selects or task.like.dtype.kind in "biu"


def _aligned(task: Task) -> bool:
    """Whether each instance holds a whole subtree."""
    if task.runs is None:
        return False
    *counts, last = (end - first for first, end in task.runs)
    size = counts[0]
    return size & (size - 1) == 0 and all(count == size for count in counts) and last <= size


def _at_home(task: Task) -> Array:
    return task.kernel(task.values, batch_ndim=task.batch_ndim, **task.whole)


def _gathered(task: Task) -> Array:
    """All members come here."""
    spread, among = task.spread, np.array(sorted(task.members))
    needs = [
        among if instance in task.instances else among[:0]
        for instance in range(spread.world.instances)
    ]
    here = [m for m in task.members if spread.owner[m] == spread.own]
    gathered = fetch(spread, dict(zip(here, task.values, strict=True)), needs, task.like)
    members = gathered[np.searchsorted(among, task.members)]
    return task.kernel(members, batch_ndim=task.batch_ndim, **task.whole)


def _by_engine(task: Task) -> Array:
    """The engine's own sum of what the instances have summed: fastest, and its own bits."""
    # Threads would come to the engine in an order of their own on each instance.
    threads = task.spread.tag != MAIN_TAG
    if threads or len(task.instances) < task.spread.world.instances:
        return _way(replace(task, how={**task.how, "order": "linear"}))(task)
    how = {**task.whole, "order": "linear", "divisor": None}
    wide = (
        np.dtype(np.float32) if task.like.dtype.itemsize <= 2 and not _associative(task) else None
    )
    first = task.like.astype(wide) if wide and len(task.values) == 1 else None
    if first is None:
        first = (
            task.like
            if len(task.values) == 1
            else task.kernel(task.values, batch_ndim=task.batch_ndim, **how)
        )
        first = first.astype(wide) if wide else first
    total = task.spread.engine.all_reduce(first, task.op)
    if task.divisor is not None:
        total = np.divide(total, task.divisor, out=total)
    return total.astype(task.like.dtype, copy=False)


def _partials_of_any_order(task: Task) -> Array:
    """One partial result from each instance, which any order gives the same bits: a ring spreads
    the work."""
    how = {**task.how, "order": "linear"}
    if not task.op.startswith("logical"):
        how["final"] = False
    return _combine_partials(task, how, {**task.how, "order": "ring"})


def _partials_of_trees(task: Task) -> Array:
    """One subtree from each instance; its additions are numbered as the whole tree's."""
    assert task.runs is not None
    total = len(task.members)
    first, end = task.runs[0]
    level = (end - first).bit_length() - 1
    nodes = (0, task.runs[task.turn][0], total)
    how = {**task.how, "final": False, "places": task.places, "nodes": nodes}
    if len(task.instances) == 2 and not task.stochastic:  # the last addition, and no step in it
        return _combine_partials(task, how, {**task.how, "order": "linear"})
    return _combine_partials(task, how, {**task.how, "nodes": (level, 0, total)})


def _combine_partials(task: Task, how: dict[str, Any], then: dict[str, Any]) -> Array:
    """Fold what is here, then the partial results as if they were the members."""
    partial = task.values[0]
    if len(task.values) > 1 or partial.dtype != task.partial:  # a single one is not rounded
        partial = task.kernel(task.values, batch_ndim=task.batch_ndim, **how)
    firsts = [task.members[task.owners.tolist().index(instance)] for instance in task.instances]
    how = {**then, "out_dtype": task.like.dtype}
    combine = by_windows if _in_step(task) else _PASSED_ON.get(how["order"], by_windows)
    return combine(replace(task, members=tuple(firsts), values=[partial], how=how))
