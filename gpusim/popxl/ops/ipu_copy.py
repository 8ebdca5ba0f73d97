"""`ipu_copy`: a tensor on another IPU of the replica."""

from __future__ import annotations

from .._ops import shapes
from .._ops.definition import add_op
from ..errors import UndefinedValue
from ..tensor import Tensor

__all__ = ["ipu_copy"]


def ipu_copy(t: Tensor, destination: int, source: int | None = None) -> Tensor:
    """A copy of `t` on the IPU `destination`.

    **Arguments**: `source`: the IPU of `t`, by default that of the op it comes from.

    ValueError where the source is not given and not known.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.ipu_copy(popxl.constant([1.0]), destination=1, source=0).ipu
    1
    """
    if source is None:
        try:
            source = t.ipu
        except UndefinedValue as error:
            raise ValueError(
                f'Could not infer the ipu for Tensor to be copied "{t}" . Please specify `source` '
                "when copying for this tensor."
            ) from error
    attributes = {"source": source, "destination": destination}
    return add_op(shapes.IPU_COPY, [t], attributes, ipu=destination)[0]
