"""`sign`: -1, 0 or 1: the sign of each element."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["sign"]


def sign(t: Tensor) -> Tensor:
    """-1, 0 or 1: the sign of each element; its gradient is zero.

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.sign(popxl.constant([1.0, -2.0]))
    Tensor[sign_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.SIGN, [t])[0]
