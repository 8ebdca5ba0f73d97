"""`shaped_dropout`: some rows or planes of a tensor zero, by chance."""

from __future__ import annotations

from collections.abc import Iterable

from .._ops import random
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["shaped_dropout"]


def shaped_dropout(t: Tensor, seed_tensor: Tensor, shape: Iterable[int], ratio: float) -> Tensor:
    """Elements zero with probability `ratio`, else divided by 1 - ratio, as a mask of `shape` says.

    **Arguments**

    - `t`: of floating-point numbers.
    - `seed_tensor`: (2,) of uint32; replicas with equal seeds drop the same elements.
    - `shape`: what broadcasts to the shape of `t`; (n, 1), say, drops whole rows of (n, m).

    ValueError for another seed tensor or shape, or a `ratio` that is not in [0, 1).

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     seed = popxl.constant([42, 7], popxl.uint32)
    ...     t = popxl.constant(np.ones((4, 8), np.float32))
    ...     popxl.ops.shaped_dropout(t, seed, (4, 1), 0.5)
    Tensor[shapeddropout_out popxl.dtypes.float32 (4, 8)]
    """
    attributes = {"ratio": float(ratio), "shape": tuple(shape)}
    return add_op(random.SHAPED_DROPOUT, [t, seed_tensor], attributes)[0]
