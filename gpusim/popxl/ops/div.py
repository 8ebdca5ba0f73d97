"""`div`: lhs divided by rhs, with NumPy's broadcasting."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["div"]


def div(lhs: Tensor, rhs: Tensor) -> Tensor:
    """`lhs` divided by `rhs`; integers are rounded to zero.

    Shapes broadcast as NumPy's.

    Raises:
        TypeError: for different dtypes.
        ValueError: for shapes that do not broadcast.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.div(popxl.constant([[1.0], [2.0]]), popxl.constant([3.0, 2.0]))
    Tensor[div_out popxl.dtypes.float32 (2, 2)]
    """
    return add_op(elementwise.DIV, [lhs, rhs])[0]
