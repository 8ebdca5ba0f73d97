"""`gelu`, `gelu_`: the Gaussian error linear unit, by the approximation with tanh."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["gelu", "gelu_"]


def gelu(t: Tensor) -> Tensor:
    """The Gaussian error linear unit, by the approximation with tanh.

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.gelu(popxl.constant([-1.0, 1.0]))
    Tensor[gelu_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.GELU, [t])[0]


def gelu_(t: Tensor) -> Tensor:
    """The Gaussian error linear unit, by the approximation with tanh, in place: `t`
    changes, and the result is the same memory.

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.gelu_(popxl.constant([-1.0, 1.0]))
    Tensor[geluinplace_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.GELU_INPLACE, [t])[0]
