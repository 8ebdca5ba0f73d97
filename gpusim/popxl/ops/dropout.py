"""`dropout`: some elements zero, by chance."""

from __future__ import annotations

from .._ops import random
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["dropout"]


def dropout(t: Tensor, seed_tensor: Tensor, p: float) -> Tensor:
    """Each element zero with probability `p`, else divided by 1 - p.

    **Arguments**

    - `t`: of floating-point numbers.
    - `seed_tensor`: (2,) of uint32; replicas with equal seeds drop the same elements.

    ValueError for another seed tensor, or a `p` that is not in [0, 1).

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     seed = popxl.constant([42, 7], popxl.uint32)
    ...     popxl.ops.dropout(popxl.constant([1.0, 2.0]), seed, p=0.1)
    Tensor[dropout_out popxl.dtypes.float32 (2,)]
    """
    attributes = {"ratio": float(p), "shape": t.shape}
    return add_op(random.DROPOUT, [t, seed_tensor], attributes)[0]
