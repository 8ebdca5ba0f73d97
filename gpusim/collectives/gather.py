"""all_gather and psum_scatter, each the other's transpose, and pgather."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ReplicaIndexError
from ..groups import Groups
from ..libraries import call_on_bits
from ..reduction import ReductionLike
from .distributed import algorithms, rearrange, scatter
from .distributed.layout import Layout
from .fold import Fold, by_group, by_replica, fold_all, fold_groups, to_replicas
from .kernels import copy, empty
from .operand import Array, Operand, Result, normalize_axis, read_only, read_only_alias, unstack
from .record import AxisIndexGroups, AxisName, Call, ShapeDtype, collective

# all_gather


def _gather_all(x: Operand, *, groups: Groups | None, axis: int, tiled: bool) -> Result:
    axis = x.batch_ndim + x.axis(axis, "axis", x.ndim + (not tiled))
    if groups is None:
        if x.listed and not x.same:
            return Result(join(x.values, axis, tiled), False)
        gathered = _gather(x.stacked(), axis, tiled)
        return Result(read_only(gathered) if x.listed else read_only_alias(gathered, x), False)
    if x.listed:
        lists = (x.members(group) for group in groups.members)
        return to_replicas([join(members, axis, tiled) for members in lists], x, groups)
    # The groups' own axis is one more batch axis behind their members'.
    members = by_group(x.stacked(), groups).swapaxes(0, 1)
    return to_replicas(_gather(members, axis + 1, tiled), x, groups)


def _gather_all_distributed(
    layout: Layout, x: Operand, *, groups: Groups | None, axis: int, tiled: bool
) -> Result:
    """The definition, on the members of all groups that have a member here."""
    x.axis(axis, "axis", x.ndim + (not tiled))
    gathered, among, own = rearrange.fetch_groups(layout, x, groups)
    operand = Operand(gathered, x.batch_ndim, x.collective)
    value, mapped = _gather_all(operand, groups=among, axis=axis, tiled=tiled)
    return Result(value[own], True) if mapped else Result(read_only(value), False)


def _gather_all_result(
    operands: list[ShapeDtype], members: int, *, axis: int, tiled: bool
) -> list[ShapeDtype]:
    ((shape, dtype),) = operands
    axis = normalize_axis(axis, len(shape) + (not tiled), "axis")
    if tiled:
        return [((*shape[:axis], shape[axis] * members, *shape[axis + 1 :]), dtype)]
    return [((*shape[:axis], members, *shape[axis:]), dtype)]


def join(members: list[Array], axis: int, tiled: bool) -> Array:
    """Arrays of a list stacked along a new axis, or concatenated along an old one."""
    shape, count = members[0].shape, len(members)
    joined = empty(members[0], (*shape[:axis], count, *shape[axis:]))
    place: tuple[Any, ...] = (slice(None),) * axis
    copy([(joined[(*place, number, ...)], member) for number, member in enumerate(members)])
    if not tiled:
        return joined
    return joined.reshape(*shape[:axis], count * shape[axis], *shape[axis + 1 :])


def _gather(members: Array, axis: int, tiled: bool) -> Array:
    """Members (n, ...) with their axis moved to ``axis``, and merged with the one there."""
    gathered = np.moveaxis(members, 0, axis)
    if not tiled:
        return gathered
    shape = gathered.shape
    return gathered.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


@collective(
    local=_gather_all,
    distributed=_gather_all_distributed,
    result=_gather_all_result,
    moves=True,
    groups="even",
    replicated=True,
)
def all_gather(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
) -> Call:
    """The values of all replicas of the group, on each of them.

    **Arguments**:

    - `x`: a pytree of arrays.
    - `axis_name`: a mapped axis, or a tuple of them.
    - `axis_index_groups`: groups of one size, as in `psum`.
    - `axis`: where the replicas' values go; a negative one counts from the end of the result.
    - `tiled`: False: stacked along a new axis there. True: concatenated along the existing axis.
    - `to`: "varying", "invarying" or "reduced", JAX's types of the result, which has none here.

    **Returns**: the gathered values; of stacked arrays a read-only view where there can be one (a
    tiled result is usually a copy).

    **Raises**: AxisError for an axis out of range, ValueError for groups that do not fit and for
    another `to`.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> x = np.array([[1, 2], [3, 4]])
    >>> f = lambda x: lax.all_gather(x, "i", axis=1)
    >>> gpusim.vmap(f, axis_name="i", out_axes=None)(x)
    array([[1, 3],
           [2, 4]])
    >>> gpusim.collectives.all_gather(np.arange(4), groups=[[0, 2], [3, 1]]).value.tolist()
    [[0, 2], [3, 1], [0, 2], [3, 1]]
    """
    if to not in ("varying", "invarying", "reduced"):
        raise ValueError(
            f"all_gather to must be 'varying', 'invarying' or 'reduced', but got {to!r}"
        )
    parameters = {"axis": axis, "tiled": bool(tiled)}
    return Call(all_gather, (x,), axis_name, axis_index_groups, None, parameters)


# psum_scatter


def _sum_scatter(
    x: Operand, *, groups: Groups | None, fold: Fold, scatter_dimension: int, tiled: bool
) -> Result:
    count = x.size if groups is None else groups.group_size
    axis = scattered_axis(x.shape, x.dtype, scatter_dimension, tiled, count)
    fold = fold.scattered()
    cut_axis = axis if fold.spec.order == "ring" else None  # the ring's blocks are the slices
    cut = x.batch_ndim + axis
    if groups is None:
        return x.mapped(_slices(fold_all(x, fold, cut_axis=cut_axis), cut, count, tiled))
    totals = fold_groups(x, groups, fold, cut_axis=cut_axis)
    if x.listed:
        slices = [_slices(total, cut, count, tiled) for total in totals]
        position = {r: (g, p) for g, row in enumerate(groups.members) for p, r in enumerate(row)}
        at = (position[replica] for replica in range(x.size))
        return Result([slices[g][p, ...] for g, p in at], True)
    if isinstance(totals, list):
        return Result(by_replica([_slices(t, cut, count, tiled) for t in totals], groups), True)
    return Result(by_replica(_slices(totals, cut + 1, count, tiled).swapaxes(0, 1), groups), True)


def _sum_scatter_distributed(
    layout: Layout,
    x: Operand,
    *,
    groups: Groups | None,
    fold: Fold,
    scatter_dimension: int,
    tiled: bool,
) -> Result:
    count = layout.size if groups is None else groups.group_size
    axis = scattered_axis(x.shape, x.dtype, scatter_dimension, tiled, count)
    if not fold.spec.in_phases:
        return scatter.sum_scatter(layout, x, groups, fold, axis, tiled)
    cut_axis = axis if fold.spec.order == "ring" else None
    total, _ = algorithms.reduce(layout, x, groups, fold.scattered(), cut_axis=cut_axis)
    local = layout.local.tolist()
    if groups is None:
        places, totals = local, [total] * len(local)
    else:
        places = [groups.members[groups.assignment[m]].index(m) for m in local]
        totals = list(total)
    cut = x.batch_ndim + axis
    pieces = [
        _slices(one, cut, count, tiled)[place, ...]
        for one, place in zip(totals, places, strict=True)
    ]
    return Result(call_on_bits(np.stack, pieces), True)


def _sum_scatter_result(
    operands: list[ShapeDtype], members: int, *, scatter_dimension: int, tiled: bool
) -> list[ShapeDtype]:
    ((shape, dtype),) = operands
    axis = scattered_axis(shape, dtype, scatter_dimension, tiled, members)
    kept = (shape[axis] // members,) if tiled else ()
    return [((*shape[:axis], *kept, *shape[axis + 1 :]), dtype)]


def scattered_axis(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    scatter_dimension: int,
    tiled: bool,
    count: int,
) -> int:
    """The axis that is cut among `count` members, checked; and a dtype that adds."""
    axis = normalize_axis(scatter_dimension, len(shape), "scatter_dimension")
    length = shape[axis]
    if length % count if tiled else length != count:
        expected = f"a multiple of {count}" if tiled else f"{count}"
        raise ValueError(
            f"psum_scatter (tiled={tiled}) needs {expected} elements, as many as a group has "
            f"replicas, along scatter_dimension {scatter_dimension}, got shape {shape}"
        )
    if dtype == np.bool_:
        raise TypeError("psum_scatter: bool cannot be added, convert it to an integer type first")
    return axis


def _slices(total: Array, cut: int, count: int, tiled: bool) -> Array:
    """The sum as (count, ...), a view: its slices along axis `cut`, in front."""
    if tiled:
        shape = total.shape
        total = total.reshape(*shape[:cut], count, shape[cut] // count, *shape[cut + 1 :])
    return np.moveaxis(total, cut, 0)


@collective(
    local=_sum_scatter,
    distributed=_sum_scatter_distributed,
    result=_sum_scatter_result,
    folds=True,
    groups="even",
)
def psum_scatter(
    x: Any,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: AxisIndexGroups = None,
    tiled: bool = False,
    reduction: ReductionLike | None = None,
) -> Call:
    """The sum over the replicas; each replica keeps its own slice.

    **Arguments**:

    - `x`: a pytree of arrays.
    - `axis_name`: a mapped axis, or a tuple of them.
    - `scatter_dimension`: the axis of `x` that is cut into a slice for each replica of the group;
      a negative one counts from the end.
    - `axis_index_groups`: groups of one size, as in `psum`.
    - `tiled`: False: the axis has as many elements as the group has replicas, and is removed. True:
      its size is a multiple of that, and it stays.
    - `reduction`: as in `psum`; in ring order the ring's blocks are the slices.

    **Raises**: ValueError where the axis does not divide so, AxisError for an axis out of range,
    and, as JAX does, TypeError for bool.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> x = np.arange(8).reshape(2, 4)
    >>> gpusim.vmap(lambda x: lax.psum_scatter(x, "i", tiled=True), axis_name="i")(x)
    array([[ 4,  6],
           [ 8, 10]])
    """
    parameters = {"scatter_dimension": scatter_dimension, "tiled": bool(tiled)}
    return Call(psum_scatter, (x,), axis_name, axis_index_groups, reduction, parameters)


@collective()
def _all_gather_transpose(
    ct: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    axis: int = 0,
    tiled: bool = False,
    reduction: ReductionLike | None = None,
) -> Call:
    """The sum over the replicas of each replica's part of the gathered value's cotangent."""
    return psum_scatter.call(
        ct, axis_name, scatter_dimension=axis, axis_index_groups=axis_index_groups, tiled=tiled,
        reduction=reduction,
    )  # fmt: skip


@collective()
def _psum_scatter_transpose(
    ct: Any,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: AxisIndexGroups = None,
    tiled: bool = False,
) -> Call:
    """The cotangents of the slices, gathered: every replica contributed to all of them."""
    return all_gather.call(
        ct, axis_name, axis_index_groups=axis_index_groups, axis=scatter_dimension, tiled=tiled
    )


all_gather.transpose = _all_gather_transpose
psum_scatter.transpose = _psum_scatter_transpose

# pgather


def _gather_chosen(src: Operand, idx: Operand) -> Result:
    check_indices(src, idx, src.size)
    if not idx.same:
        values = choose(src, idx.stacked(), mapped=True)
        return Result(unstack(values) if src.listed or idx.listed else values, True)
    if idx[0].ndim == 0:
        return Result(read_only(src[int(idx[0])]), False)
    return Result(choose(src, idx[0], mapped=False), False)


def _gather_chosen_distributed(layout: Layout, src: Operand, idx: Operand) -> Result:
    check_indices(src, idx, layout.size)
    found, among = rearrange.fetch_chosen(layout, src, idx)
    source = src if found is None else Operand(found, src.batch_ndim, src.collective)
    return Result(choose(source, among, mapped=idx.varies), idx.varies)


def _gather_chosen_result(operands: list[ShapeDtype], members: int) -> list[ShapeDtype]:
    (shape, dtype), (chosen, _) = operands
    return [((*chosen, *shape), dtype)]


def check_indices(source: Operand, chosen: Operand, size: int) -> None:
    """Refuse indices that are not numbers of one of `size` replicas."""
    if chosen.dtype.kind not in "iu":
        raise TypeError(f"pgather: idx must be integers, got {chosen.dtype}")
    if (chosen.size, chosen.batch_shape) != (source.size, source.batch_shape):
        raise ValueError(
            f"pgather: src has replica and batch axes {(source.size, *source.batch_shape)}, "
            f"idx has {(chosen.size, *chosen.batch_shape)}"
        )
    for numbers in chosen.values if chosen.listed else (chosen.values,):
        wrong = (numbers < 0) | (numbers >= size)
        if wrong.any():
            raise ReplicaIndexError(
                f"pgather: idx must be replica numbers from 0 to {size - 1}, "
                f"got {numbers[wrong][0]}"
            )


def choose(source: Operand, numbers: Array, *, mapped: bool) -> Array:
    """The rows of the source at (R,) *batch, *k: from each batch entry its own."""
    if source.listed:
        return _choose_from_list(source, numbers, mapped)
    entries: list[Any] = []
    for axis, length in enumerate(source.batch_shape, start=int(mapped)):
        entries.append(np.arange(length).reshape(-1, *[1] * (numbers.ndim - axis - 1)))
    chosen: Array = source.values[(numbers, *entries)]
    return chosen


def _choose_from_list(source: Operand, numbers: Array, mapped: bool) -> Array:
    """The same, one source replica at a time: a list is never stacked as a whole."""
    first = source[0]
    chosen = empty(first, (*numbers.shape, *source.shape))
    for replica in np.unique(numbers).tolist():
        where = numbers == replica
        entries = np.nonzero(where)[int(mapped) :][: source.batch_ndim]
        chosen[where] = source[replica][entries]
    return chosen


@collective(
    local=_gather_chosen,
    distributed=_gather_chosen_distributed,
    result=_gather_chosen_result,
    moves=True,
    operands=2,
)
def pgather(src: Any, idx: Any, axes: AxisName) -> Call:
    """The values of the replicas with the given indices: ``all_gather(src, axes)[idx]``.

    **Arguments**:

    - `src`: an array.
    - `idx`: an integer array of replica indices, from 0 to R - 1. For stacked arrays, indices that
      are the same on all replicas are broadcast along axis 0.
    - `axes`: a mapped axis, or a tuple of them.

    **Returns**: an array of shape ``idx.shape + src.shape``.

    **Raises**: TypeError for indices that are not integers; ValueError for one out of range (an
    IndexError too).

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> x = np.array([10, 20, 30])
    >>> f = lambda x: lax.pgather(x, np.array([2, 0]), "i")
    >>> gpusim.vmap(f, axis_name="i", out_axes=None)(x)
    array([30, 10])
    """
    return Call(pgather, (src, idx), axes)
