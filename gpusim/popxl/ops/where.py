"""`where`: elements of one tensor or of another."""

from __future__ import annotations

from .. import dtypes
from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor
from .utils import cast_if_needed

__all__ = ["where"]


def where(condition: Tensor, lhs: Tensor, rhs: Tensor) -> Tensor:
    """Elements of `lhs` where the condition is true, else of `rhs`.

    Shapes broadcast as NumPy's; a condition of another dtype is cast to bool.

    Raises:
        TypeError: for different dtypes of `lhs` and `rhs`.
        ValueError: for shapes that do not broadcast.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.where(popxl.constant([True, False]), popxl.constant(1.0), popxl.constant(2.0))
    Tensor[where_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.WHERE, [cast_if_needed(condition, dtypes.bool), lhs, rhs])[0]
