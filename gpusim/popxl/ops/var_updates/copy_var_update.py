"""Set a tensor in place."""

from __future__ import annotations

from ..._ops.definition import add_op
from ..._ops.updates import COPY
from ...tensor import Tensor

__all__ = ["copy_var_update_"]


def copy_var_update_(t: Tensor, X: Tensor) -> Tensor:
    """Set `t` to `X`, in place; the updated tensor. ValueError for another shape."""
    return add_op(COPY, [t, X])[0]
