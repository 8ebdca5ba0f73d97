"""`logical_or`: whether either of two elements is true."""

from __future__ import annotations

from .. import dtypes
from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor
from .utils import cast_if_needed

__all__ = ["logical_or"]


def logical_or(lhs: Tensor, rhs: Tensor) -> Tensor:
    """Whether either of two elements is true, as bool; other dtypes are cast to it.

    Shapes broadcast as NumPy's; ValueError for those that do not.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.logical_or(popxl.constant([True, False]), popxl.constant(True))
    Tensor[or_out popxl.dtypes.bool (2,)]
    """
    sides = [cast_if_needed(t, dtypes.bool) for t in (lhs, rhs)]
    return add_op(elementwise.OR, sides)[0]
