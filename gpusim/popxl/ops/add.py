"""`add`, `add_`: the sum of elements, with NumPy's broadcasting, and in place."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["add", "add_"]


def add(lhs: Tensor, rhs: Tensor) -> Tensor:
    """The sum of elements.

    Shapes broadcast as NumPy's.

    Raises:
        TypeError: for different dtypes.
        ValueError: for shapes that do not broadcast.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.add(popxl.constant([[1.0], [2.0]]), popxl.constant([3.0, 2.0]))
    Tensor[add_out popxl.dtypes.float32 (2, 2)]
    """
    return add_op(elementwise.ADD, [lhs, rhs])[0]


def add_(lhs: Tensor, rhs: Tensor) -> Tensor:
    """Adds `rhs` to `lhs` in place: `lhs` changes, and the result is the same memory.

    Raises:
        TypeError: for different dtypes.
        ValueError: where `rhs` does not broadcast to the shape of `lhs`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.add_(popxl.variable([1.0, 2.0]), popxl.constant(3.0))
    Tensor[addlhsinplace_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.ADD_LHS_INPLACE, [lhs, rhs])[0]
