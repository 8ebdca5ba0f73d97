"""`abs`: the magnitude of each element."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["abs"]


def abs(t: Tensor) -> Tensor:
    """The magnitude of each element.

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.abs(popxl.constant([-1.5, 2.0]))
    Tensor[abs_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.ABS, [t])[0]
