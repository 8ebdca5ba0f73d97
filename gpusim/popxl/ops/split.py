"""`split`: a tensor in parts along an axis."""

from __future__ import annotations

from collections.abc import Sequence

from .._ops import shapes
from .._ops.definition import add_op
from ..tensor import Tensor
from .utils import one_axis

__all__ = ["split"]


def split(t: Tensor, splits: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    """The parts of a tensor along an axis.

    **Arguments**: `splits`: how many equal parts, or the length of each.

    ValueError for parts that are not the whole, or an axis that `t` has not.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     parts = popxl.ops.split(popxl.constant([1.0, 2.0, 3.0]), [1, 2])
    >>> [part.shape for part in parts]
    [(1,), (2,)]
    """
    place = one_axis(t, axis)
    if isinstance(splits, int):
        axis_len = t.shape[place]
        if splits < 1 or axis_len % splits:
            raise ValueError(
                f"Split {splits} does not equally divide tensor axis {axis} of length {axis_len}."
            )
        splits = [axis_len // splits] * splits
    names = [f"split_out_{number}" for number in range(len(splits))]
    attributes = {"counts": tuple(splits), "axis": place}
    return list(add_op(shapes.SPLIT, [t], attributes, output_names=names))
