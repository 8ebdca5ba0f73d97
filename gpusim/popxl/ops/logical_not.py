"""`logical_not`: whether elements are false."""

from __future__ import annotations

from .. import dtypes
from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor
from .utils import cast_if_needed

__all__ = ["logical_not"]


def logical_not(t: Tensor) -> Tensor:
    """Whether each element is false, as bool; other dtypes are cast to it.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.logical_not(popxl.constant([True, False]))
    Tensor[not_out popxl.dtypes.bool (2,)]
    """
    return add_op(elementwise.NOT, [cast_if_needed(t, dtypes.bool)])[0]
