"""`exp`, `exp_`: the exponential of each element."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["exp", "exp_"]


def exp(t: Tensor) -> Tensor:
    """The exponential of each element.

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.exp(popxl.constant([0.0, 1.0]))
    Tensor[exp_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.EXP, [t])[0]


def exp_(t: Tensor) -> Tensor:
    """The exponential of each element, in place: `t` changes, and the result is the same
    memory.

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.exp_(popxl.constant([0.0, 1.0]))
    Tensor[expinplace_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.EXP_INPLACE, [t])[0]
