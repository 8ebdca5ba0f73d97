"""`sub`: lhs minus rhs, with NumPy's broadcasting."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["sub"]


def sub(lhs: Tensor, rhs: Tensor) -> Tensor:
    """`lhs` minus `rhs`.

    Shapes broadcast as NumPy's.

    Raises:
        TypeError: for different dtypes.
        ValueError: for shapes that do not broadcast.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.sub(popxl.constant([[1.0], [2.0]]), popxl.constant([3.0, 2.0]))
    Tensor[sub_out popxl.dtypes.float32 (2, 2)]
    """
    return add_op(elementwise.SUB, [lhs, rhs])[0]
