"""`softmax`: elements along an axis as probabilities."""

from __future__ import annotations

from .._ops import normalisation
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["softmax"]


def softmax(t: Tensor, axis: int) -> Tensor:
    """The exponentials of elements, divided by their sum along an axis.

    Shape and dtype as `t`; ValueError for an axis that it has not.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.softmax(popxl.constant([[1.0, 2.0]]), axis=-1)
    Tensor[softmax_out popxl.dtypes.float32 (1, 2)]
    """
    return add_op(normalisation.SOFTMAX, [t], {"axis": axis})[0]
