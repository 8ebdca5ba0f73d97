"""`mul`: the product of elements, with NumPy's broadcasting."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["mul"]


def mul(lhs: Tensor, rhs: Tensor) -> Tensor:
    """The product of elements.

    Shapes broadcast as NumPy's.

    Raises:
        TypeError: for different dtypes.
        ValueError: for shapes that do not broadcast.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.mul(popxl.constant([[1.0], [2.0]]), popxl.constant([3.0, 2.0]))
    Tensor[mul_out popxl.dtypes.float32 (2, 2)]
    """
    return add_op(elementwise.MUL, [lhs, rhs])[0]
