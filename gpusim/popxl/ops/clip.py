"""`clip`: elements within limits."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["clip"]


def clip(t: Tensor, min: float = float("-inf"), max: float = float("inf")) -> Tensor:
    """Each element, or the limit that it is beyond; beyond a limit the gradient is zero.

    Shape and dtype as `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.clip(popxl.constant([-3.0, 0.5]), min=-1.0, max=1.0)
    Tensor[clip_out popxl.dtypes.float32 (2,)]
    """
    return add_op(elementwise.CLIP, [t], {"min": float(min), "max": float(max)})[0]
