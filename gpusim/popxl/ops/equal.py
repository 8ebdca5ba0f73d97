"""`equal`: whether elements are equal, as bool, with NumPy's broadcasting."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["equal"]


def equal(lhs: Tensor, rhs: Tensor) -> Tensor:
    """Whether elements are equal, as bool.

    Shapes broadcast as NumPy's.

    Raises:
        TypeError: for different dtypes.
        ValueError: for shapes that do not broadcast.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.equal(popxl.constant([[1.0], [2.0]]), popxl.constant([3.0, 2.0]))
    Tensor[equal_out popxl.dtypes.bool (2, 2)]
    """
    return add_op(elementwise.EQUAL, [lhs, rhs])[0]
