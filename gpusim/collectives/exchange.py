"""all_to_all and pswapaxes: the replica axis changes places with an axis of the value."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..groups import Groups
from .distributed import rearrange
from .distributed.layout import Layout
from .distributed.rearrange import cut, merge
from .fold import by_group, by_replica
from .kernels import copy, empty
from .operand import Array, Operand, Result, normalize_axis, read_only_alias
from .record import AxisIndexGroups, AxisName, Call, ShapeDtype, collective


def _all_to_all(
    x: Operand, *, groups: Groups | None, split_axis: int, concat_axis: int, tiled: bool
) -> Result:
    count = x.size if groups is None else groups.group_size
    split, concat = exchanged_axes(x.collective, x.shape, split_axis, concat_axis, tiled, count)
    split, concat = split + x.batch_ndim, concat + x.batch_ndim
    if x.listed:
        return _exchange_lists(x, split, concat, tiled, groups)
    if groups is None:
        return Result(read_only_alias(_exchange(x.values, split, concat, tiled), x), True)
    # The groups' own axis is one more batch axis behind their members'.
    members = by_group(x.values, groups).swapaxes(0, 1)
    y = _exchange(members, split + 1, concat + 1, tiled)
    return Result(by_replica(y.swapaxes(0, 1), groups), True)


def _all_to_all_distributed(
    layout: Layout,
    x: Operand,
    *,
    groups: Groups | None,
    split_axis: int,
    concat_axis: int,
    tiled: bool,
) -> Result:
    partition = groups or Groups.all(layout.size)
    split, concat = exchanged_axes(
        x.collective, x.shape, split_axis, concat_axis, tiled, partition.group_size
    )
    batch = x.batch_ndim
    return rearrange.all_to_all(layout, x, partition, split + batch, concat + batch, tiled)


def _all_to_all_result(
    operands: list[ShapeDtype], members: int, *, split_axis: int, concat_axis: int, tiled: bool
) -> list[ShapeDtype]:
    ((shape, dtype),) = operands
    split, concat = exchanged_axes("all_to_all", shape, split_axis, concat_axis, tiled, members)
    sizes = list(shape)
    if tiled:
        sizes[split] //= members
        sizes[concat] *= members
    else:
        del sizes[split]
        sizes.insert(concat, members)
    return [(tuple(sizes), dtype)]


def exchanged_axes(
    name: str, shape: tuple[int, ...], split_axis: int, concat_axis: int, tiled: bool, count: int
) -> tuple[int, int]:
    """The two axes, checked for groups of `count`."""
    split = normalize_axis(split_axis, len(shape), "split_axis")
    concat = normalize_axis(concat_axis, len(shape), "concat_axis")
    length = shape[split]
    if length % count if tiled else length != count:
        expected = f"a multiple of {count}" if tiled else f"{count}"
        raise ValueError(
            f"{name} (tiled={tiled}) needs {expected} elements, as many as a group has "
            f"replicas, along split_axis {split_axis}, got shape {shape}"
        )
    return split, concat


def _exchange(x: Array, split: int, concat: int, tiled: bool) -> Array:
    """Senders (n, ...) to receivers (n, ...); axes count in one member's array."""
    if tiled:
        x = cut(x, split + 1, x.shape[0])
    y = np.moveaxis(np.moveaxis(x, split + 1, 0), 1, concat + 1)
    return merge(y, concat + 1) if tiled else y


def _exchange_lists(
    operand: Operand, split: int, concat: int, tiled: bool, groups: Groups | None
) -> Result:
    """Each sender's pieces are written into all receivers' arrays at once, without stacking."""
    received: dict[int, Array] = {}
    members = (tuple(range(operand.size)),) if groups is None else groups.members
    for group in members:
        sent = [
            np.moveaxis(cut(operand[r], split, len(group)) if tiled else operand[r], split, 0)
            for r in group
        ]
        shape = (*sent[0].shape[: concat + 1], len(group), *sent[0].shape[concat + 1 :])
        y = empty(sent[0], shape)
        place: tuple[Any, ...] = (slice(None),) * (concat + 1)
        copy([(y[(*place, sender, ...)], pieces) for sender, pieces in enumerate(sent)])
        received |= zip(group, merge(y, concat + 1) if tiled else y, strict=True)
    return Result([received[replica] for replica in range(operand.size)], True)


@collective(
    local=_all_to_all,
    distributed=_all_to_all_distributed,
    result=_all_to_all_result,
    moves=True,
    groups="even",
)
def all_to_all(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: AxisIndexGroups = None,
    tiled: bool = False,
) -> Call:
    """Each replica cuts its value into a slice for each replica of the group, and gets one from
    each.

    **Arguments**:

    - `x`: a pytree of arrays.
    - `axis_name`: a mapped axis, or a tuple of them.
    - `split_axis`: the axis that is cut; slice r goes to replica r of the group.
    - `concat_axis`: where the received slices go, in the senders' order; both may be negative.
    - `axis_index_groups`: groups of one size, as in `psum`.
    - `tiled`: False: split_axis has as many elements as the group has replicas and is removed, and
      the received slices are stacked along a new axis. True: split_axis is divided by the group's
      size, and the slices are concatenated.

    **Returns**: the received slices; of stacked arrays a read-only view where there can be one.

    **Raises**: ValueError where split_axis does not divide so, AxisError for an axis out of range.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> x = np.array([["to 0", "to 1"], ["TO 0", "TO 1"]])
    >>> gpusim.vmap(lambda x: lax.all_to_all(x, "i", 0, 0), axis_name="i")(x)
    array([['to 0', 'TO 0'],
           ['to 1', 'TO 1']], dtype='<U4')
    """
    parameters = {"split_axis": split_axis, "concat_axis": concat_axis, "tiled": bool(tiled)}
    return Call(all_to_all, (x,), axis_name, axis_index_groups, None, parameters)


@collective()
def _all_to_all_transpose(
    ct: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: AxisIndexGroups = None,
    tiled: bool = False,
) -> Call:
    """The slices sent back: split and concat axes exchanged."""
    return all_to_all.call(
        ct, axis_name, concat_axis, split_axis, axis_index_groups=axis_index_groups, tiled=tiled
    )


all_to_all.transpose = _all_to_all_transpose


def _swap(x: Operand, *, groups: Groups | None, axis: int) -> Result:
    return _all_to_all(x, groups=groups, split_axis=axis, concat_axis=axis, tiled=False)


def _swap_distributed(layout: Layout, x: Operand, *, groups: Groups | None, axis: int) -> Result:
    return _all_to_all_distributed(
        layout, x, groups=groups, split_axis=axis, concat_axis=axis, tiled=False
    )


def _swap_result(operands: list[ShapeDtype], members: int, *, axis: int) -> list[ShapeDtype]:
    return _all_to_all_result(operands, members, split_axis=axis, concat_axis=axis, tiled=False)


@collective(
    local=_swap, distributed=_swap_distributed, result=_swap_result, moves=True, groups="even"
)
def pswapaxes(
    x: Any, axis_name: AxisName, axis: int, *, axis_index_groups: AxisIndexGroups = None
) -> Call:
    """Exchange the mapped axis with an axis of the array, by an `all_to_all` along that axis.

    Arguments and errors are those of `all_to_all`, with `axis` for both of its axes.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> x = np.arange(4).reshape(2, 2)
    >>> gpusim.vmap(lambda x: lax.pswapaxes(x, "i", 0), axis_name="i")(x)
    array([[0, 2],
           [1, 3]])
    """
    return Call(pswapaxes, (x,), axis_name, axis_index_groups, None, {"axis": axis})


pswapaxes.transpose = pswapaxes  # swapping two axes is its own inverse
