"""`io_tile_copy`: a tensor on the other tiles."""

from __future__ import annotations

from .._ops import shapes
from .._ops.definition import add_op
from ..errors import UndefinedValue
from ..tensor import Tensor

__all__ = ["io_tile_copy"]


def io_tile_copy(t: Tensor) -> Tensor:
    """A copy of `t` on the other tiles: an IPU has compute tiles, and IO tiles for its transfers.

    Where the tiles of `t` are not known, as those of a constant, the context says where it goes.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph, popxl.io_tiles():
    ...     popxl.ops.io_tile_copy(popxl.constant([1.0])).tile_set
    'io'
    """
    try:
        other = "io" if t.tile_set == "compute" else "compute"
    except UndefinedValue:
        other = None
    return add_op(shapes.IO_TILE_COPY, [t], tile_set=other)[0]
