"""`cumsum`: running sums along an axis."""

from __future__ import annotations

from .. import dtypes
from .._ops import reductions
from .._ops.definition import add_op
from ..tensor import Tensor, constant
from .utils import one_axis

__all__ = ["cumsum"]


def cumsum(t: Tensor, dim: int | None = 0) -> Tensor:
    """The sum of all elements up to each one, itself included, along an axis.

    Shape and dtype as `t`; float16 is added up in float32. ValueError for an axis that `t` has not.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.cumsum(popxl.constant([1.0, 2.0, 3.0]))
    Tensor[cumsum_out popxl.dtypes.float32 (3,)]
    """
    axis = one_axis(t, dim or 0)
    return add_op(reductions.CUMSUM, [t, constant(axis, dtypes.int32)], {"axis": axis})[0]
