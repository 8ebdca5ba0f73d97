"""`pow`: powers of elements."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor, constant
from ..typing_ import TensorLike

__all__ = ["pow"]


def pow(t: Tensor, e: float | int | TensorLike) -> Tensor:
    """Each element to the power `e`, which is a number, an array or a tensor.

    Shapes broadcast as NumPy's.

    Raises:
        TypeError: for a tensor `e` of another dtype.
        ValueError: for shapes that do not broadcast.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.pow(popxl.constant([1.0, 2.0]), 3)
    Tensor[pow_out popxl.dtypes.float32 (2,)]
    """
    exponent = e if isinstance(e, Tensor) else constant(e, t.dtype)
    return add_op(elementwise.POW, [t, exponent])[0]
