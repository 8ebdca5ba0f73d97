"""`detach`, `detach_`: values through which no gradient goes."""

from __future__ import annotations

from .._ops import shapes
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["detach", "detach_"]


def detach(t: Tensor) -> Tensor:
    """The same values, through which no gradient goes.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.detach(popxl.constant([1.0, 2.0]))
    Tensor[detach_out popxl.dtypes.float32 (2,)]
    """
    return add_op(shapes.DETACH, [t])[0]


def detach_(t: Tensor) -> Tensor:
    """`t` as a view through which no gradient goes.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.detach_(popxl.constant([1.0, 2.0]))
    Tensor[detachinplace_out popxl.dtypes.float32 (2,)]
    """
    return add_op(shapes.DETACH_INPLACE, [t])[0]
