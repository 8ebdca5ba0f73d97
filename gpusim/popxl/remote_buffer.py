"""Remote buffers: entries of one shape in memory off the chip. Every replica has its own."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index as as_index
from typing import TYPE_CHECKING

from .context import get_ir
from .dtypes import dtype

if TYPE_CHECKING:
    from ._tensor import Tensor
    from .ir import Ir

__all__ = ["RemoteBuffer", "remote_buffer"]


class RemoteBuffer:
    """A number of entries, each of which holds a tensor of one shape and dtype.

    Entries are zeros until a variable or `ops.remote_store` sets them.
    """

    def __init__(
        self, tensor_shape: Iterable[int], tensor_dtype: dtype, entries: int, ir: Ir | None = None
    ) -> None:
        self._ir = get_ir() if ir is None else ir
        self._id = len(self._ir._remote_buffers) + 1
        self._shape = tuple(tensor_shape)
        self._dtype = tensor_dtype
        self._meta_shape: tuple[int, ...] = ()
        self._shards: int | None = None
        self.entries = entries
        self._ir._remote_buffers.append(self)

    def set_remote_buffer_info(
        self, tensor_dtype: dtype, tensor_shape: Iterable[int], entries: int
    ) -> None:
        """Change dtype, shape and number of entries."""
        self._dtype, self._shape = tensor_dtype, tuple(tensor_shape)
        self.entries = entries

    def validate_tensor_matches_buffer(self, t: Tensor, num_shards: int = 1) -> None:
        """Raise ValueError if a tensor, or one of its shards, has another shape or dtype."""
        shape = t.shape if num_shards == 1 else (-(-t.nelms // num_shards),)
        if getattr(t, "_shards", 0) == 1 and self._shape == (t.nelms,):
            shape = self._shape  # a single shard, flat as shards are
        if (shape, t.dtype) != (self._shape, self._dtype):
            raise ValueError(
                f"Tensor {t.id} does not match buffer.\nExisting remote buffer has "
                f"shape={self._shape} and dtype={self._dtype}.\n"
                f"The tensor has shape={shape}, dtype={t.dtype}."
            )

    @property
    def remote_buffer_id(self) -> int:
        """Its number in the Ir, from 1."""
        return self._id

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of an entry."""
        return self._shape

    @property
    def tensor_dtype(self) -> dtype:
        """The dtype of an entry."""
        return self._dtype

    @property
    def entries(self) -> int:
        """The number of entries; it can be set."""
        return self._entries

    @entries.setter
    def entries(self, _entries: int) -> None:
        if as_index(_entries) < 1:
            raise ValueError(f"Entries must be a non-zero, positive integer. Got {_entries}")
        self._entries = as_index(_entries)

    @property
    def meta_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensors if the entries are shards, else ()."""
        return self._meta_shape

    @meta_shape.setter
    def meta_shape(self, shape: Iterable[int]) -> None:
        self._meta_shape = tuple(shape)

    def __repr__(self) -> str:
        return f"RemoteBuffer[id={self._id} {self._entries} x {self._dtype} {self._shape}]"


def remote_buffer(
    tensor_shape: Iterable[int], tensor_dtype: dtype, entries: int = 1
) -> RemoteBuffer:
    """A new remote buffer of the current Ir.

    **Raises**

    - ValueError: if the number of entries is below 1.
    - RuntimeError: outside of a graph.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.remote_buffer((2, 3), popxl.float16, entries=4)
    RemoteBuffer[id=1 4 x popxl.dtypes.float16 (2, 3)]
    """
    return RemoteBuffer(tensor_shape, tensor_dtype, entries)
