"""`floor`: each element rounded down to an integer."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["floor"]


def floor(t: Tensor) -> Tensor:
    """Each element rounded down to an integer; its gradient is zero.

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.floor(popxl.constant([-1.5, 2.2]))
    Tensor[floor_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.FLOOR, [t])[0]
