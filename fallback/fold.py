"""A fold of one kind of step: the members in an order, with an accumulator and a rounding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextvars import Context
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import memory, threads
from .arguments import check_batch_offset, check_out, check_partial
from .blocks import BlockPlan, plan_blocks
from .draws import Draws
from .formats import real_of
from .jobs import Block, FoldJob
from .members import Members
from .philox import Lanes
from .plan import plan_fold
from .rounding import check_counter
from .running import reduce_rows
from .spec import FoldPart, FoldSpec
from .subnormals import require_subnormals

#: A context in which NumPy ignores floating-point errors. np.errstate takes longer to enter.
QUIET = Context()
QUIET.run(np.seterr, all="ignore")


def fold_members(
    spec: FoldSpec,
    members: NDArray[Any] | Sequence[NDArray[Any]] | Members,
    *,
    batch_ndim: int = 0,
    call: int = 0,
    batch_offset: ArrayLike = 0,
    part: FoldPart | None = None,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """`run_fold` without a wire and levels, whose walks fold by this."""
    require_subnormals()
    group = Members.of(members)
    dtype, count, shape, strides = group.dtype, group.count, group.shape, group.strides
    earlier = extent = None
    if part is not None:
        extent = part.extent
    if part is not None and part.partial is not None:
        partial = np.asarray(part.partial)
        plan = plan_fold(spec, extent, dtype, count, shape, batch_ndim)
        check_partial(partial, shape, plan.arithmetic.partial)
        earlier = Members(partial[np.newaxis])
        strides += (partial.strides,)
    counter = call and check_counter("call", call)
    blocks = plan_blocks(spec, extent, dtype, count, shape, batch_ndim, strides, group.stacked)
    arithmetic, offsets = blocks.arithmetic, None
    offset: Any = batch_offset
    if arithmetic.stochastic or type(offset) is not int or not 0 <= offset < 2**64:
        offsets = check_batch_offset(offset, blocks.plan.batch)
    if out is None:
        out = memory.empty(shape, arithmetic.result)
    else:
        check_out(out, shape, arithmetic.result)
    if not out.size:
        return out
    if blocks.compiled is not None:
        blocks.compiled(group, earlier, out, counter, offsets)
        return out
    if blocks.one_call is not None:
        ufunc, order = blocks.one_call
        if QUIET.copy().run(reduce_rows, ufunc, group.arrays[order], out):
            return out
    lanes = Lanes(spec.seed, counter, spec.stream) if arithmetic.stochastic else None
    _run(blocks, group, earlier, out, lanes, offsets)
    return out


def _run(
    blocks: BlockPlan,
    group: Members,
    earlier: Members | None,
    out: NDArray[Any],
    lanes: Lanes | None,
    offsets: NDArray[np.uint64] | None,
) -> None:
    """Fold all blocks into `out`, alone or with the other threads."""
    shape, target = blocks.shape, out
    if blocks.parts:
        target = out.reshape(-1).view(real_of(out.dtype))
        group, earlier = group.as_reals(), earlier and earlier.as_reals()
    if group.shape != shape:
        group, earlier = group.reshape(shape), earlier and earlier.reshape(shape)
    if target.shape != shape:
        target = target.reshape(shape)

    fold_blocks = partial(_fold_blocks, blocks, group, earlier, target, lanes, offsets)
    if blocks.blocks is not None:
        QUIET.copy().run(fold_blocks, blocks.blocks)
    else:

        def fold_block(block: Block) -> None:
            require_subnormals()
            QUIET.copy().run(fold_blocks, (block,))

        threads.share(fold_block, blocks.cut_up(), blocks.work)


def _fold_blocks(
    plan: BlockPlan,
    group: Members,
    earlier: Members | None,
    out: NDArray[Any],
    lanes: Lanes | None,
    offsets: NDArray[np.uint64] | None,
    blocks: Iterable[Block],
) -> None:
    """Fold these blocks into `out`, in the thread that calls."""
    draws = None
    for block in blocks:
        if lanes is not None and offsets is not None:
            layout, batch = plan.layout, offsets.reshape(plan.layout.batch)
            draws = Draws(lanes, block.box, layout.value, batch, layout.first)
        block.kernel(FoldJob(plan.plan, block, group, earlier, out[block.box], draws))
