"""`relu`, `relu_`: each element, or 0 where it is negative."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["relu", "relu_"]


def relu(t: Tensor) -> Tensor:
    """Each element, or 0 where it is negative.

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.relu(popxl.constant([1.0, -2.0]))
    Tensor[relu_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.RELU, [t])[0]


def relu_(t: Tensor) -> Tensor:
    """Each element, or 0 where it is negative, in place: `t` changes, and the result is the
    same memory.

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.relu_(popxl.constant([1.0, -2.0]))
    Tensor[reluinplace_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.RELU_INPLACE, [t])[0]
