"""`fmod`: the remainder of lhs divided by rhs, with the sign of lhs, with NumPy's broadcasting."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["fmod"]


def fmod(lhs: Tensor, rhs: Tensor) -> Tensor:
    """The remainder of `lhs` divided by `rhs`, with the sign of `lhs`.

    Shapes broadcast as NumPy's.

    Raises:
        TypeError: for different dtypes.
        ValueError: for shapes that do not broadcast.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.fmod(popxl.constant([[1.0], [2.0]]), popxl.constant([3.0, 2.0]))
    Tensor[fmod_out popxl.dtypes.float32 (2, 2)]
    """
    return add_op(elementwise.FMOD, [lhs, rhs])[0]
