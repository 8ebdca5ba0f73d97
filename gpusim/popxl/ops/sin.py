"""`sin`: the sine of each element, which is in radians."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["sin"]


def sin(t: Tensor) -> Tensor:
    """The sine of each element, which is in radians.

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.sin(popxl.constant([0.0, 1.0]))
    Tensor[sin_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.SIN, [t])[0]
