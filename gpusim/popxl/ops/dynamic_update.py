"""`dynamic_update`, `dynamic_update_`: a slice replaced, at a place known only when it runs."""

from __future__ import annotations

from collections.abc import Iterable

from .._ops import indexing
from .._ops.definition import Definition, add_op
from ..tensor import Tensor

__all__ = ["dynamic_update", "dynamic_update_"]


def dynamic_update(
    t: Tensor,
    index: Tensor,
    t_update: Tensor,
    axes: Iterable[int],
    sizes: Iterable[int],
    no_overlap: bool,
) -> Tensor:
    """`t` with `t_update` in the place of the slice that `dynamic_slice` would give.

    Arguments and errors as those of `dynamic_slice`; also ValueError for an update that does not
    broadcast to the slice's shape.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.zeros((4, 3), np.float32))
    ...     rows = popxl.constant(np.ones((2, 3), np.float32))
    ...     popxl.ops.dynamic_update(t, popxl.constant([1], popxl.uint32), rows, [0], [2], True)
    Tensor[dynamicupdate_out popxl.dtypes.float32 (4, 3)]
    """
    return _update(indexing.DYNAMIC_UPDATE, t, index, t_update, axes, sizes, no_overlap)


def dynamic_update_(
    t: Tensor,
    index: Tensor,
    t_update: Tensor,
    axes: Iterable[int],
    sizes: Iterable[int],
    no_overlap: bool,
) -> Tensor:
    """`dynamic_update` in place: `t` changes, and the result is the same memory.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.variable(np.zeros((4, 3), np.float32))
    ...     rows = popxl.constant(np.ones((2, 3), np.float32))
    ...     popxl.ops.dynamic_update_(t, popxl.constant([1], popxl.uint32), rows, [0], [2], True)
    Tensor[dynamicupdateinplace_out popxl.dtypes.float32 (4, 3)]
    """
    return _update(indexing.DYNAMIC_UPDATE_INPLACE, t, index, t_update, axes, sizes, no_overlap)


def _update(
    definition: Definition,
    t: Tensor,
    index: Tensor,
    t_update: Tensor,
    axes: Iterable[int],
    sizes: Iterable[int],
    no_overlap: bool,
) -> Tensor:
    attributes = {"axes": tuple(axes), "sizes": tuple(sizes), "no_overlap": bool(no_overlap)}
    return add_op(definition, [t, index, t_update], attributes)[0]
