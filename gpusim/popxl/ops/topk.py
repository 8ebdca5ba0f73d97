"""`topk`: the greatest or the least elements along an axis."""

from __future__ import annotations

from .._ops import reductions
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["topk"]


def topk(
    t: Tensor,
    k: int,
    axis: int,
    largest: bool,
    sorted: bool,
    available_memory_proportion: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The `k` greatest or least elements along an axis, and their indices as uint32.

    **Arguments**

    - `largest`: whether the greatest are wanted, else the least.
    - `sorted`: whether they come in their order; else they come as they lie in `t`.
    - `available_memory_proportion`: an IPU's; it changes nothing here.

    Of equal elements the first counts first. ValueError for a `k` that is not 1 to the axis's
    length.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     values, indices = popxl.ops.topk(popxl.constant([1.0, 3.0, 2.0]), 2, 0, True, True)
    >>> values.shape, indices.dtype
    ((2,), popxl.dtypes.uint32)
    """
    attributes = {"k": k, "axis": axis, "largest": bool(largest), "sorted": bool(sorted)}
    names = ["topk_out_value", "topk_out_indices"]
    values, indices = add_op(reductions.TOPK, [t], attributes, output_names=names)
    return values, indices
