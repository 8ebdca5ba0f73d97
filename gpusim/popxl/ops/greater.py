"""`greater`: whether elements of one tensor are greater than those of another."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["greater"]


def greater(input: Tensor, other: Tensor) -> Tensor:
    """Whether elements of the first are greater than those of the second, as bool.

    Shapes broadcast as NumPy's.

    Raises:
        TypeError: for different dtypes.
        ValueError: for shapes that do not broadcast.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.greater(popxl.constant([[1.0], [2.0]]), popxl.constant([3.0, 2.0]))
    Tensor[greater_out popxl.dtypes.bool (2, 2)]
    """
    return add_op(elementwise.GREATER, [input, other])[0]
