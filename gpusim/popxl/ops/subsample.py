"""`subsample`: every n-th element along each axis."""

from __future__ import annotations

from collections.abc import Iterable

from .._ops import shapes
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["subsample"]


def subsample(t: Tensor, strides: int | Iterable[int]) -> Tensor:
    """Every n-th element along each axis, from the first one on.

    **Arguments**: `strides`: a number for each axis, or for the first ones only.

    ValueError for more numbers than axes, or numbers that are not positive.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.subsample(popxl.constant([1.0, 2.0, 3.0]), 2)
    Tensor[subsample_out popxl.dtypes.float32 (2,)]
    """
    steps = [strides] if isinstance(strides, int) else list(strides)
    if len(steps) > t.rank:
        raise ValueError(
            "The length of subsample `strides` must not be greater than the rank of the input "
            "tensor."
        )
    if any(step < 1 for step in steps):
        raise ValueError(f"strides must be positive, but they are {steps}")
    count = len(steps)
    attributes = {
        "starts": (0,) * count,
        "stops": t.shape[:count],
        "steps": tuple(steps),
        "axes": tuple(range(count)),
    }
    return add_op(shapes.SUBSAMPLE, [t], attributes)[0]
