"""Extremes over the replicas and the numbers of the replicas themselves."""

from __future__ import annotations

import numpy as np

from ..libraries import on_device
from .groupwise import fold_all, fold_groups, spread
from .operand import Array, GroupsLike, Operand, Result, Values, read_only

#: What no replica's number can be; JAX's mark for "no replica holds the value".
NO_REPLICA = np.iinfo(np.int32).max


def pmax(x: Values, *, groups: GroupsLike = None, batch_ndim: int = 0) -> Result:
    """The largest value over the replicas; NaN wins, and -0 < +0.

    ``x`` stacked (R, *batch, *s), or a list of R arrays; ``groups`` may differ in size. Returns
    (*batch, *s), not mapped; with groups (R, *batch, *s), mapped; same dtype. A value that is the
    same on all replicas is returned as it is, read-only. Complex numbers are a TypeError.

    >>> pmax(np.array([[1, 5], [4, 2]]))
    Result(value=array([4, 5]), mapped=False)
    """
    return _extreme("max", x, groups, batch_ndim, "pmax")


def pmin(x: Values, *, groups: GroupsLike = None, batch_ndim: int = 0) -> Result:
    """The smallest value over the replicas; otherwise as `pmax`.

    >>> pmin(np.array([[1, 5], [4, 2]]))
    Result(value=array([1, 2]), mapped=False)
    """
    return _extreme("min", x, groups, batch_ndim, "pmin")


def pargmax(x: Values, *, batch_ndim: int = 0) -> Result:
    """For each element, the first replica that holds the largest value (int32, not mapped).

    "Holds" means compares equal, as in JAX's definition: +0 holds -0, and no replica holds a NaN,
    so that elements with one on any replica give the largest int32.

    >>> pargmax(np.array([[1.0, 5.0, np.nan], [4.0, 5.0, 0.0]]))
    Result(value=array([ 1, 0, 2147483647], dtype=int32), mapped=False)
    """
    return _holder("max", x, batch_ndim, "pargmax")


def pargmin(x: Values, *, batch_ndim: int = 0) -> Result:
    """For each element, the first replica that holds the smallest value; otherwise as `pargmax`.

    >>> pargmin(np.array([[1.0, 5.0], [4.0, 2.0]]))
    Result(value=array([0, 1], dtype=int32), mapped=False)
    """
    return _holder("min", x, batch_ndim, "pargmin")


def axis_index(size: int) -> Result:
    """Each replica's own number, int32.

    >>> axis_index(3)
    Result(value=array([0, 1, 2], dtype=int32), mapped=True)
    """
    return Result(np.arange(size, dtype=np.int32), True)


def ordered(x: Values, batch_ndim: int, collective: str) -> Operand:
    operand = Operand(x, batch_ndim, collective)
    if operand.dtype.kind == "c":
        raise TypeError(f"{collective}: complex numbers have no order, got {operand.dtype}")
    return operand


def _extreme(op: str, x: Values, groups: GroupsLike, batch_ndim: int, collective: str) -> Result:
    operand = ordered(x, batch_ndim, collective)
    partition = operand.groups(groups, uneven=True)
    if partition is None:
        value = read_only(operand[0]) if operand.same else fold_all(operand, op=op)
        return Result(value, False)
    if operand.same:
        shared = read_only(operand[0])
        each = np.broadcast_to(shared, (operand.size, *shared.shape))
        return Result([shared] * operand.size if operand.listed else each, True)
    return spread(fold_groups(operand, partition, op=op), operand, partition)


def _holder(op: str, x: Values, batch_ndim: int, collective: str) -> Result:
    operand = ordered(x, batch_ndim, collective)
    extreme = operand[0] if operand.same else fold_all(operand, op=op)
    if on_device(extreme):  # as many launches for any number of replicas
        held = operand.stacked()[: 1 if operand.same else operand.size] == extreme
        first = np.where(np.any(held, axis=0), np.argmax(held, axis=0), NO_REPLICA)
        return Result(first.astype(np.int32), False)
    holder: Array = np.full_like(extreme, NO_REPLICA, dtype=np.int32, order="C", subok=False)
    for replica in reversed(range(1 if operand.same else operand.size)):
        np.copyto(holder, np.int32(replica), where=operand[replica] == extreme)
    return Result(holder, False)
