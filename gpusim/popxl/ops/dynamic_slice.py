"""`dynamic_slice`: a slice whose beginning is known only when it runs."""

from __future__ import annotations

from collections.abc import Iterable

from .._ops import indexing
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["dynamic_slice"]


def dynamic_slice(
    t: Tensor, index: Tensor, axes: Iterable[int], sizes: Iterable[int], no_overlap: bool
) -> Tensor:
    """A copy of a slice of `t` that begins at `index`.

    **Arguments**

    - `index`: an integer for each of `axes`; beyond the end of an axis the slice goes on at its
      beginning.
    - `axes`, `sizes`: the axes that are sliced, and how many elements of each.
    - `no_overlap`: says that no two slices overlap, which saves an IPU work; it changes nothing
      here.

    Raises:
        ValueError: for numbers that do not belong together, or sizes that are too large.
        TypeError: for an index that is no integer.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.zeros((4, 3), np.float32))
    ...     popxl.ops.dynamic_slice(t, popxl.constant([1], popxl.uint32), [0], [2], True)
    Tensor[dynamicslice_out popxl.dtypes.float32 (2, 3)]
    """
    attributes = {"axes": tuple(axes), "sizes": tuple(sizes), "no_overlap": bool(no_overlap)}
    return add_op(indexing.DYNAMIC_SLICE, [t, index], attributes)[0]
