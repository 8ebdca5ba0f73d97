"""`geluerf`, `geluerf_`: the Gaussian error linear unit, by the error function."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["geluerf", "geluerf_"]


def geluerf(t: Tensor) -> Tensor:
    """The Gaussian error linear unit, by the error function.

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.geluerf(popxl.constant([-1.0, 1.0]))
    Tensor[geluerf_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.GELU_ERF, [t])[0]


def geluerf_(t: Tensor) -> Tensor:
    """The Gaussian error linear unit, by the error function, in place: `t` changes, and the
    result is the same memory.

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.geluerf_(popxl.constant([-1.0, 1.0]))
    Tensor[geluerfinplace_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.GELU_ERF_INPLACE, [t])[0]
