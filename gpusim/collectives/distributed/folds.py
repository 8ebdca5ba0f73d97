"""Folds across instances: which of the ways of `ways.py` a group goes, and what its members get."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...reduction import Reduction
from ..groupwise import places_of
from ..indices import NO_REPLICA, ordered
from ..kernels import copy, empty
from ..operand import Array, GroupsLike, Operand, Result, Values, as_groups, replica_index
from ..sums import fold_arguments, quotient, quotient_dtype, sum_arguments
from . import scatter, ways
from .spread import Spread
from .task import Task


def psum(
    spread: Spread,
    x: Values,
    *,
    groups: GroupsLike = None,
    reduction: Reduction | None = None,
    batch_ndim: int = 0,
    call: int | None = None,
    places: Any = None,
) -> Result:
    operand = Operand(x, batch_ndim, "psum")
    how = _by_engine(sum_arguments(reduction, call, "psum"), reduction)
    return _reduce(spread, operand, groups, places, how)


def pmean(
    spread: Spread,
    x: Values,
    *,
    groups: GroupsLike = None,
    reduction: Reduction | None = None,
    batch_ndim: int = 0,
    call: int | None = None,
    places: Any = None,
) -> Result:
    operand = Operand(x, batch_ndim, "pmean")
    how = _by_engine(sum_arguments(reduction, call, "pmean"), reduction)
    if operand.dtype.kind not in "biu":
        return _reduce(spread, operand, groups, places, how, mean=True)
    total, mapped = _reduce(spread, operand, groups, places, how)
    floating = quotient_dtype(operand)
    if not mapped:
        return Result(quotient(total, spread.size, floating), False)
    partition = as_groups(groups, spread.size, "pmean", uneven=True)
    assert partition is not None
    sizes = [partition.group_sizes[partition.assignment[m]] for m in spread.mine.tolist()]
    column = np.asarray(sizes, floating).reshape(-1, *[1] * (total.ndim - 1))
    return Result(quotient(total, column, floating), True)


def all_reduce(
    spread: Spread,
    x: Values,
    *,
    reduction: Reduction,
    groups: GroupsLike = None,
    batch_ndim: int = 0,
    call: int = 0,
    places: Any = None,
) -> Result:
    operand = Operand(x, batch_ndim, "all_reduce")
    how = _by_engine(fold_arguments(reduction, call, "all_reduce"), reduction)
    return _reduce(spread, operand, groups, places, how)


def pmax(spread: Spread, x: Values, *, groups: GroupsLike = None, batch_ndim: int = 0) -> Result:
    return _extreme(spread, "max", ordered(x, batch_ndim, "pmax"), groups)


def pmin(spread: Spread, x: Values, *, groups: GroupsLike = None, batch_ndim: int = 0) -> Result:
    return _extreme(spread, "min", ordered(x, batch_ndim, "pmin"), groups)


def pargmax(spread: Spread, x: Values, *, batch_ndim: int = 0) -> Result:
    return _holder(spread, "max", ordered(x, batch_ndim, "pargmax"))


def pargmin(spread: Spread, x: Values, *, batch_ndim: int = 0) -> Result:
    return _holder(spread, "min", ordered(x, batch_ndim, "pargmin"))


def psum_scatter(
    spread: Spread,
    x: Values,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    groups: GroupsLike = None,
    reduction: Reduction | None = None,
    batch_ndim: int = 0,
    call: int | None = None,
    places: Any = None,
) -> Result:
    operand = Operand(x, batch_ndim, "psum_scatter")
    partition = as_groups(groups, spread.size, "psum_scatter")
    how = sum_arguments(reduction, call, "psum_scatter")
    return scatter.psum_scatter(
        spread, operand, partition, scatter_dimension, tiled, how, places_of(operand, places, how)
    )


def all_gather_transpose(spread: Spread, ct: Values, *, axis: int = 0, **options: Any) -> Result:
    return psum_scatter(spread, ct, scatter_dimension=axis, **options)


def pbroadcast_transpose(
    spread: Spread, ct: Values, source: int, *, batch_ndim: int = 0, **options: Any
) -> Result:
    source = replica_index(source, spread.size, "pbroadcast: source")
    total = psum(spread, ct, batch_ndim=batch_ndim, **options).value
    out = np.zeros_like(total, shape=(len(spread.mine), *total.shape), order="C")
    if spread.owner[source] == spread.own:
        out[spread.position[source]] = total
    return Result(out, True)


def _by_engine(how: dict[str, Any], reduction: Reduction | None) -> dict[str, Any]:
    """The arguments of a fold, with the order "engine" where there is an engine to do it."""
    engines = reduction is not None and reduction.order == "engine"
    return {**how, "order": "engine"} if engines else how


def _extreme(spread: Spread, op: str, operand: Operand, groups: GroupsLike) -> Result:
    return _reduce(spread, operand, groups, None, {"op": op})


def _holder(spread: Spread, op: str, operand: Operand) -> Result:
    """Each instance finds the first of its own that holds the extreme; the smallest of those."""
    extreme = _extreme(spread, op, operand, None).value
    holder: Array = np.full_like(extreme, NO_REPLICA, dtype=np.int32, order="C", subok=False)
    for place, member in reversed([*enumerate(spread.mine.tolist())]):
        np.copyto(holder, np.int32(member), where=operand[place] == extreme)
    mine = np.broadcast_to(holder, (len(spread.mine), *holder.shape))
    return _extreme(spread, "min", Operand(mine, operand.batch_ndim, operand.collective), None)


def _reduce(
    spread: Spread,
    operand: Operand,
    groups: GroupsLike,
    places: Any,
    how: dict[str, Any],
    *,
    mean: bool = False,
) -> Result:
    """The fold of each group, for those of its members that are here."""
    if operand.dtype == np.bool_ and how["op"] in ("sum", "prod"):
        operand = operand.astype(np.dtype(np.int32))
    partition = as_groups(groups, spread.size, operand.collective, uneven=True)
    places = places_of(operand, places, how)
    if partition is None:
        members = tuple(range(spread.size))
        task = Task.of(spread, operand, members, places, how, mean=mean)
        return Result(ways.fold(task), False)
    out = empty(operand[0], (len(spread.mine), *operand.batch_shape, *operand.shape))
    received: list[tuple[Array, Array]] = []
    for number, members in enumerate(partition.members):
        here = [m for m in members if spread.owner[m] == spread.own]
        if not here:
            continue
        place = places * partition.group_count + number
        task = Task.of(spread, operand, members, place, how, mean=mean)
        value = ways.fold(task)
        received += [(out[int(spread.position[m]), ...], value) for m in here]
    copy(received)
    return Result(out, True)
