"""ops.remote_store: a tensor into an entry of a remote buffer."""

from __future__ import annotations

from .._ops.definition import add_op
from .._ops.hosting import REMOTE_STORE
from ..remote_buffer import RemoteBuffer
from ..tensor import Tensor
from .remote_load import offset_of

__all__ = ["remote_store"]


def remote_store(remote_buffer: RemoteBuffer, offset: int | Tensor, t: Tensor) -> None:
    """Copy a tensor into an entry of a remote buffer.

    Errors as `remote_load`; also ValueError where the tensor has another shape or dtype.
    """
    remote_buffer.validate_tensor_matches_buffer(t)
    inputs, attributes = offset_of(remote_buffer, offset)
    add_op(REMOTE_STORE, [t, *inputs], attributes)
