"""`argmax`, `argmin`: where along an axis the greatest or the least element is."""

from __future__ import annotations

from .._ops import reductions
from .._ops.definition import add_op
from ..tensor import Tensor
from .utils import one_axis

__all__ = ["argmax", "argmin"]


def argmax(t: Tensor, dim: int | None = 0, keepdim: bool | None = False) -> Tensor:
    """The index of the greatest element along an axis, as int32; of equal ones the first.

    **Arguments**

    - `dim`: the axis, negative ones from the end.
    - `keepdim`: whether the axis stays, with a length of 1.

    ValueError for an axis that `t` has not.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.argmax(popxl.constant([[1.0, 3.0], [2.0, 0.0]]), dim=1)
    Tensor[argmax_out popxl.dtypes.int32 (2,)]
    """
    attributes = {"axis": one_axis(t, dim or 0), "keepdims": bool(keepdim)}
    return add_op(reductions.ARG_MAX, [t], attributes)[0]


def argmin(t: Tensor, dim: int | None = 0, keepdim: bool | None = False) -> Tensor:
    """The index of the least element along an axis, as int32; of equal ones the first.

    Arguments and errors as `argmax`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.argmin(popxl.constant([[1.0, 3.0], [2.0, 0.0]]), keepdim=True)
    Tensor[argmin_out popxl.dtypes.int32 (1, 2)]
    """
    attributes = {"axis": one_axis(t, dim or 0), "keepdims": bool(keepdim)}
    return add_op(reductions.ARG_MIN, [t], attributes)[0]
