"""ops.init: a tensor of zeros, or of nothing in particular."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from .. import dtypes
from .._ops.definition import add_op
from .._ops.hosting import INIT
from ..tensor import Tensor, TensorSpec

__all__ = ["init"]


def init(
    shape: Iterable[int],
    dtype: dtypes.dtype,
    name: str | None = None,
    init_type: Literal["zero", "undef"] = "zero",
    meta_shape: Iterable[int] | None = None,
) -> Tensor:
    """A new tensor of zeros; "undef" promises nothing about its values (they are zeros too).

    ValueError for another `init_type`.
    """
    if init_type not in ("zero", "undef"):
        raise ValueError(f"Unknown init_type: {init_type}")
    spec = TensorSpec(shape, dtype, () if meta_shape is None else meta_shape)
    return add_op(INIT, [], {"spec": spec, "init_type": init_type}, name)[0]
