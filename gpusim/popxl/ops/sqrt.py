"""`sqrt`: the square root of each element."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["sqrt"]


def sqrt(t: Tensor) -> Tensor:
    """The square root of each element.

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.sqrt(popxl.constant([4.0, 1.0]))
    Tensor[sqrt_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.SQRT, [t])[0]
