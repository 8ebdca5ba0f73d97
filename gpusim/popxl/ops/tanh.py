"""`tanh`: the hyperbolic tangent of each element."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["tanh"]


def tanh(t: Tensor) -> Tensor:
    """The hyperbolic tangent of each element.

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.tanh(popxl.constant([0.0, 1.0]))
    Tensor[tanh_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.TANH, [t])[0]
