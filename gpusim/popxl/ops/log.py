"""`log`, `log2`: the natural logarithm of each element."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["log", "log2"]


def log(t: Tensor) -> Tensor:
    """The natural logarithm of each element.

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.log(popxl.constant([1.0, 2.0]))
    Tensor[log_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.LOG, [t])[0]


def log2(t: Tensor) -> Tensor:
    """The logarithm to the base 2 of each element.

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.log2(popxl.constant([1.0, 2.0]))
    Tensor[log2_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.LOG2, [t])[0]
