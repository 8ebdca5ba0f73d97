"""`identity`: a copy of a tensor."""

from __future__ import annotations

from .._ops import shapes
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["identity"]


def identity(t: Tensor, output_name: str | None = None) -> Tensor:
    """A copy of `t`, with a name if one is given.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.identity(popxl.constant([1.0, 2.0]), "copied")
    Tensor[copied popxl.dtypes.float32 (2,)]
    """
    names = None if output_name is None else [output_name]
    return add_op(shapes.IDENTITY, [t], output_names=names)[0]
