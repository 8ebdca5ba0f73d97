"""The folds of collectives: a Reduction with its counters, the fold of each group, and conversions
between values per replica and values per group."""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..formats import kernel_format
from ..groups import Groups
from ..libraries import call_on_bits, on_device
from ..reduction import Reduction
from ..wires import wire_info
from .kernels import FoldSpec, copy, empty, replace_fields, rows, run_fold
from .operand import Array, Operand, Result, read_only

#: Values of at most so many bytes are copied, if that spares calls.
COPIED = 1 << 14

#: Reductions without arithmetic: nothing is rounded.
MAX, MIN = Reduction(op="max"), Reduction(op="min")


class Fold(NamedTuple):
    """A Reduction with its counters.

    **Arguments**: `call` is the call number, `batch_offset` the linear index of the batch entries
    over the other mapped axes (None counts them from 0); only stochastic rounding uses them.
    `gathered` says whether the result is sent to all members.
    """

    reduction: Reduction
    call: int = 0
    batch_offset: Any = None
    gathered: bool = True

    @property
    def spec(self) -> FoldSpec:
        """The fold for the kernels."""
        spec = fold_spec(self.reduction)
        if self.gathered or not spec.in_phases:
            return spec
        return replace_fields(spec, gathered=False)

    def scattered(self) -> Fold:
        """The fold whose result is not sent to all members."""
        return self._replace(gathered=False)

    @property
    def by_engine(self) -> bool:
        """Whether an engine between instances is to add, in its own order."""
        return self.reduction.order == "engine"

    def offsets(self, operand: Operand) -> Any:
        """The batch offset of each batch entry; 0 where no random bits are drawn."""
        if not self.reduction.draws:
            return 0
        if self.batch_offset is None:
            shape = operand.batch_shape
            return np.arange(np.prod(shape, dtype=np.int64)).reshape(shape)
        return np.asarray(self.batch_offset)


@lru_cache(256)
def fold_spec(reduction: Reduction) -> FoldSpec:
    """The specification of the kernels' fold for a Reduction."""
    return FoldSpec(
        op=reduction.op,
        order="linear" if reduction.order == "engine" else reduction.schedule,
        accumulate=kernel_format(reduction.accumulate),
        rounding=reduction.rounding,
        seed=reduction.seed,
        wire=wire_info(reduction.wire),
        groups_of=reduction.groups_of,
        across=None if reduction.across is None else fold_spec(reduction.across),
        divide=reduction.divide,
    )


def fold_all(
    operand: Operand, fold: Fold, *, mean: bool = False, cut_axis: int | None = None
) -> Array:
    """The fold over all replicas: (*batch, *s); `mean` divides it by their number."""
    spec = fold.spec
    if mean or cut_axis is not None:
        spec = replace_fields(spec, divisor=operand.size if mean else None, cut_axis=cut_axis)
    return run_fold(
        spec,
        operand.values,
        batch_ndim=operand.batch_ndim,
        call=fold.call,
        batch_offset=fold.offsets(operand),
    )


def fold_groups(
    operand: Operand,
    groups: Groups,
    fold: Fold,
    *,
    mean: bool = False,
    cut_axis: int | None = None,
) -> Array | list[Array]:
    """The fold of each group, as (groups, *batch, *s) or a list of arrays (*batch, *s).

    `mean` divides each by its own group's size.
    """
    spec = fold.spec if cut_axis is None else replace_fields(fold.spec, cut_axis=cut_axis)
    if not operand.listed and groups.strided:  # one fold for all: two more batch axes of a view
        members = _blocks(operand.stacked(), groups).swapaxes(0, 1)
        return _fold_batched(members, 2, operand, groups, spec, fold, mean)
    if not operand.listed and groups.even and on_device(operand.values):
        members = by_group(operand.values, groups).swapaxes(0, 1)
        return _fold_batched(members, 1, operand, groups, spec, fold, mean)
    offsets = fold.offsets(operand)
    return [
        run_fold(
            replace_fields(spec, divisor=len(group)) if mean else spec,
            _members(operand, group),
            batch_ndim=operand.batch_ndim,
            call=fold.call,
            batch_offset=offsets * groups.group_count + g,
        )
        for g, group in enumerate(groups.members)
    ]


def _members(operand: Operand, group: tuple[int, ...]) -> Any:
    """The values of a group; small ones are copied into one array, which folds in few calls."""
    values = operand.values
    if type(values) is np.ndarray and values.nbytes <= COPIED:
        return values.take(group, axis=0)
    return operand.members(group)


def _fold_batched(
    members: Array,
    axes: int,
    operand: Operand,
    groups: Groups,
    spec: FoldSpec,
    fold: Fold,
    mean: bool,
) -> Array:
    """Fold members (group size, *groups, *batch, *s); the groups are `axes` axes."""
    offsets = fold.offsets(operand)
    if fold.reduction.draws:
        ones = [1] * operand.batch_ndim
        group = np.arange(groups.group_count).reshape(*members.shape[1 : 1 + axes], *ones)
        offsets = offsets * groups.group_count + group
    folded = run_fold(
        replace_fields(spec, divisor=groups.group_size) if mean else spec,
        members,
        batch_ndim=operand.batch_ndim + axes,
        call=fold.call,
        batch_offset=offsets,
    )
    return folded.reshape(groups.group_count, *folded.shape[axes:])


def by_group(x: Array, groups: Groups) -> Array:
    """(R, ...) as (groups, group size, ...): a view of consecutive and of orthogonal groups."""
    if not groups.strided:
        return call_on_bits(operator.getitem, x, groups.matrix)
    blocks = _blocks(x, groups).swapaxes(1, 2)
    return blocks.reshape(groups.group_count, groups.group_size, *x.shape[1:])


def _blocks(x: Array, groups: Groups) -> Array:
    """Strided groups as a view (blocks, group size, stride, ...); a block is `stride` groups."""
    stride = groups.stride
    assert stride is not None
    blocks = groups.group_count // stride
    return x.reshape(blocks, groups.group_size, stride, *x.shape[1:])


def by_replica(pieces: Array | list[Array], groups: Groups) -> Array:
    """Copy pieces (groups, group size, ...), an array or one for each group, to (R, ...)."""
    if on_device(pieces[0]):
        every = call_on_bits(np.concatenate, list(pieces))
        order = np.argsort([replica for group in groups.members for replica in group])
        return rows(every, order.tolist())
    out = empty(pieces[0], (groups.size, *pieces[0].shape[1:]))
    copy(
        [
            (out[replica, ...], part[place, ...])
            for group, part in zip(groups.members, pieces, strict=True)
            for place, replica in enumerate(group)
        ]
    )
    return out


def to_replicas(values: Array | list[Array], operand: Operand, groups: Groups) -> Result:
    """Give every replica its group's value: shared and read-only in a list or if there is one."""
    if operand.listed:
        shared = [read_only(value) for value in values]
        return Result([shared[g] for g in groups.assignment], True)
    if groups.group_count == 1:
        value = read_only(values[0])
        return Result(np.broadcast_to(value, (groups.size, *value.shape)), True)
    if on_device(values[0]):
        each = call_on_bits(np.stack, values) if isinstance(values, list) else values
        return Result(rows(each, groups.assignment), True)
    out = empty(values[0], (groups.size, *values[0].shape))
    copy([(out[replica, ...], values[g]) for replica, g in enumerate(groups.assignment)])
    return Result(out, True)
