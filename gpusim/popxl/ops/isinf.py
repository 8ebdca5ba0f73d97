"""`isinf`: whether each element is infinite, as bool."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["isinf"]


def isinf(t: Tensor) -> Tensor:
    """Whether each element is infinite, as bool.

    Shape as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.isinf(popxl.constant([1.0, float("inf")]))
    Tensor[isinf_out popxl.dtypes.bool (2,)]
    """
    return add_op(elementwise.IS_INF, [t])[0]
