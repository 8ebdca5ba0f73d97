"""`logical_and`: whether both of two elements are true."""

from __future__ import annotations

from .. import dtypes
from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor
from .utils import cast_if_needed

__all__ = ["logical_and"]


def logical_and(lhs: Tensor, rhs: Tensor) -> Tensor:
    """Whether both of two elements are true, as bool; other dtypes are cast to it.

    Shapes broadcast as NumPy's; ValueError for those that do not.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.logical_and(popxl.constant([True, False]), popxl.constant(True))
    Tensor[and_out popxl.dtypes.bool (2,)]
    """
    sides = [cast_if_needed(t, dtypes.bool) for t in (lhs, rhs)]
    return add_op(elementwise.AND, sides)[0]
