"""fold: a reduction over a group's members with a defined order of additions and roundings.
The bits of its result are specified; see the numerics contract in the documentation.

Here it is chosen who folds: `sends` with a wire or levels, `fold` otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .blocks import plan_blocks
from .fold import QUIET, fold_members
from .members import Members
from .running import PROBED_WIDTH, reducer
from .sends import fold_sent
from .spec import FoldPart, FoldSpec, run_arguments
from .subnormals import require_subnormals


def fold(members: NDArray[Any] | Sequence[NDArray[Any]], **keywords: Any) -> NDArray[Any]:
    """Reduce a group's members to one value, element by element, to the contract's bits.

    `run_fold` with a FoldSpec and a FoldPart made from keywords.

    **Arguments**:

    - `members`, `batch_ndim`, `call`, `out`: as for `run_fold`. `places` is its `batch_offset`.
    - `op`, `order`, `accumulate`, `out_dtype`, `rounding`, `seed`, `divisor`, `cut_axis`: see
      `FoldSpec`.
    - `window`, `partial`, `before`, `final`, `nodes`: see `FoldPart`.

    **Returns**: as `run_fold`.

    **Raises**: as `run_fold`.

    >>> import numpy as np
    >>> x = np.array([[1.0], [2.0**-11], [2.0**-11]], np.float16)
    >>> fold(x).tolist(), fold(x, order="reverse").tolist()
    ([1.0], [1.0009765625])
    >>> fold(x, accumulate=np.float32).tolist()
    [1.0009765625]
    >>> first = fold(x[:2], accumulate=np.float32, final=False)
    >>> fold(x[2:], accumulate=np.float32, partial=first, before=2).tolist()
    [1.0009765625]
    """
    return run_fold(members=members, **run_arguments(**keywords))


def run_fold(
    spec: FoldSpec,
    members: NDArray[Any] | Sequence[NDArray[Any]] | Members,
    *,
    batch_ndim: int = 0,
    call: int = 0,
    batch_offset: ArrayLike = 0,
    part: FoldPart | None = None,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Fold a group's members according to `spec`.

    **Arguments**:

    - `spec`: the reduction.
    - `members`: an array whose axis 0 is the group's members in order, or a sequence of arrays of
      one shape and dtype, with any strides. They are only read. A member's shape is
      `(*batch, *value)`, where the `batch_ndim` leading axes are independent batch entries.
    - `call`, `batch_offset`: counters of the random numbers of stochastic rounding.
      `batch_offset` is an integer, or integers that broadcast to the batch's shape.
    - `part`: which part of a larger fold this is. None: all of it.
    - `out`: the array to write the result into, C-contiguous and of its shape and dtype. It shares
      no memory with the members or a partial result.

    **Returns**: a new C-contiguous array of shape `(*batch, *value)`, or `out`.

    **Raises**: ValueError for values outside these, TypeError for dtypes that do not fit, and
    RuntimeError if the thread flushes subnormal numbers to zero.

    >>> import numpy as np
    >>> run_fold(FoldSpec(order="tree"), np.arange(8.0).reshape(4, 2)).tolist()
    [12.0, 16.0]
    """
    numbers: dict[str, Any] = {"batch_ndim": batch_ndim, "call": call, "batch_offset": batch_offset}
    if spec.in_phases and part is None:
        require_subnormals()
        return fold_sent(spec, Members.of(members), **numbers, out=out)
    return fold_members(spec, members, **numbers, part=part, out=out)


def stacked_fold(
    spec: FoldSpec, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Callable[[NDArray[Any], int], NDArray[Any]]:
    """`run_fold` of stacked members of one kind, as a function of members and call number.

    A small sum takes little more than the one call of NumPy that makes it. Caches of such functions
    are among `kernels.plan_caches`.

    >>> total = stacked_fold(FoldSpec(), np.dtype(float), (3, 2))
    >>> total(np.arange(6.0).reshape(3, 2), 0)
    array([6., 9.])
    """

    def fold_any(members: NDArray[Any], call: int) -> NDArray[Any]:
        return run_fold(spec, members, call=call)

    count, *rest = shape
    value, width = tuple(rest), math.prod(rest)
    strides = np.empty(value, dtype).strides if width else ()
    if spec.in_phases or not (width and count):
        return fold_any
    blocks = plan_blocks(spec, None, dtype, count, value, 0, (strides,), True)
    if blocks.compiled is not None or blocks.one_call is None:
        return fold_any
    ufunc, order = blocks.one_call
    reduce = reducer(ufunc, dtype, min(width, PROBED_WIDTH), order.step < 0)
    forwards, flat = order.step > 0, len(value) == 1

    def fold_rows(members: NDArray[Any], call: int) -> NDArray[Any]:
        flags = members.flags
        if not (flags.c_contiguous and flags.aligned):
            return run_fold(spec, members, call=call)
        require_subnormals()
        rows = members if flat else members.reshape(count, width)
        found: NDArray[Any] = QUIET.copy().run(reduce, rows if forwards else rows[order])
        return found if flat else found.reshape(value)

    return fold_rows
