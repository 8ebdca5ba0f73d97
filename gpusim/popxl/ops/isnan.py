"""`isnan`: whether each element is NaN, as bool."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["isnan"]


def isnan(t: Tensor) -> Tensor:
    """Whether each element is NaN, as bool.

    Shape as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.isnan(popxl.constant([1.0, float("nan")]))
    Tensor[isnan_out popxl.dtypes.bool (2,)]
    """
    return add_op(elementwise.IS_NAN, [t])[0]
