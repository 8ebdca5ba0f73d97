"""`negate`: each element with the other sign."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["negate"]


def negate(t: Tensor) -> Tensor:
    """Each element with the other sign.

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.negate(popxl.constant([1.0, -2.0]))
    Tensor[neg_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.NEGATE, [t])[0]
