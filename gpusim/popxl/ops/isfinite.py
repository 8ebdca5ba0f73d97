"""`isfinite`: whether each element is neither infinite nor NaN."""

from __future__ import annotations

from ..tensor import Tensor
from .isinf import isinf
from .isnan import isnan
from .logical_and import logical_and
from .logical_not import logical_not

__all__ = ["isfinite"]


def isfinite(t: Tensor) -> Tensor:
    """Whether each element is neither infinite nor NaN, as bool.

    Shape as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.isfinite(popxl.constant([1.0, float("inf")]))
    Tensor[and_out popxl.dtypes.bool (2,)]
    """
    return logical_and(logical_not(isinf(t)), logical_not(isnan(t)))
