"""`lamb_square`."""

from __future__ import annotations

from .._ops import reductions
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["lamb_square"]


def lamb_square(t: Tensor) -> Tensor:
    """The sum of the squares of all elements, a float32 scalar whatever the dtype of `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.lamb_square(popxl.constant([3.0, 4.0]))
    Tensor[lambsquare_out popxl.dtypes.float32 ()]
    """
    return add_op(reductions.LAMB_SQUARE, [t])[0]
