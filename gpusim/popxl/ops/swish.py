"""`swish`, `swish_`: each element times its logistic function (also called SiLU)."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["swish", "swish_"]


def swish(t: Tensor) -> Tensor:
    """Each element times its logistic function (also called SiLU).

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.swish(popxl.constant([1.0, -2.0]))
    Tensor[swish_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.SWISH, [t])[0]


def swish_(t: Tensor) -> Tensor:
    """Each element times its logistic function (also called SiLU), in place: `t` changes,
    and the result is the same memory.

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.swish_(popxl.constant([1.0, -2.0]))
    Tensor[swishinplace_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.SWISH_INPLACE, [t])[0]
