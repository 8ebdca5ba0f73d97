"""`squeeze`: a tensor without axes of one element."""

from __future__ import annotations

from collections.abc import Iterable

from .._ops import shapes
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["squeeze"]


def squeeze(t: Tensor, axes: Iterable[int] | None = None) -> Tensor:
    """The elements of `t` without some axes of one element, by default without all of them.

    ValueError for axes that have more elements, that `t` has not, or that are named twice.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.squeeze(popxl.constant([[[1.0], [2.0]]]), axes=[0])
    Tensor[reshape_out popxl.dtypes.float32 (2, 1)]
    """
    shape = t.shape
    if axes is None:
        places = [i for i, size in enumerate(shape) if size == 1]
    else:
        places = [i if i >= 0 else i + t.rank for i in axes]
    if len(set(places)) != len(places):
        raise ValueError("Axes contains duplicates")
    for i in places:
        if not 0 <= i < t.rank:
            raise ValueError(f"Can't squeeze axis '{i}' as tensor has rank '{t.rank}'")
        if shape[i] != 1:
            raise ValueError(f"Can't squeeze axis '{i}' as length of axis is >1: {shape[i]}")
    kept = tuple(size for i, size in enumerate(shape) if i not in places)
    return add_op(shapes.RESHAPE, [t], {"shape": kept})[0]
