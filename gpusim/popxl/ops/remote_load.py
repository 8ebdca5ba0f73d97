"""ops.remote_load: an entry of a remote buffer."""

from __future__ import annotations

import math

from .._ops.definition import add_op
from .._ops.hosting import REMOTE_LOAD, REMOTE_LOAD_INPLACE
from ..remote_buffer import RemoteBuffer
from ..tensor import Tensor

__all__ = ["multiply_tuple", "remote_load", "remote_load_"]


def remote_load(
    remote_buffer: RemoteBuffer, offset: int | Tensor, name: str | None = None
) -> Tensor:
    """A copy of an entry of a remote buffer; of sharded ones the replica's shard.

    `offset` is the entry's number, or a tensor that holds one. ValueError for a number that the
    buffer has not (a tensor's is looked at when it runs: IndexError).
    """
    inputs, attributes = offset_of(remote_buffer, offset)
    return add_op(REMOTE_LOAD, inputs, attributes, name)[0]


def remote_load_(remote_buffer: RemoteBuffer, offset: int | Tensor, t: Tensor) -> Tensor:
    """Copy an entry of a remote buffer into a tensor, and return that.

    Errors as `remote_load`; also ValueError where the tensor has another shape or dtype.
    """
    remote_buffer.validate_tensor_matches_buffer(t)
    inputs, attributes = offset_of(remote_buffer, offset)
    return add_op(REMOTE_LOAD_INPLACE, [t, *inputs], attributes)[0]


def multiply_tuple(tup: tuple[int, ...]) -> int:
    """The product of the numbers.

    >>> multiply_tuple((2, 3, 4))
    24
    """
    return math.prod(tup)


def offset_of(buffer: RemoteBuffer, offset: int | Tensor) -> tuple[list[Tensor], dict[str, object]]:
    """An offset as inputs and attributes of an op."""
    if isinstance(offset, Tensor):
        if offset.nelms != 1 or not offset.dtype.is_int:
            raise ValueError(f"offset must be one integer, got {offset}")
        return [offset], {"buffer": buffer, "offset": None}
    if not 0 <= offset < buffer.entries:
        raise ValueError(f"offset={offset}: {buffer} has the entries 0 to {buffer.entries - 1}")
    return [], {"buffer": buffer, "offset": offset}
