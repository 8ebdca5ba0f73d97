"""ops.host_store: a tensor into a stream."""

from __future__ import annotations

from .._ops.definition import add_op
from .._ops.hosting import HOST_STORE
from ..streams import DeviceToHostStream
from ..tensor import Tensor

__all__ = ["host_store"]


def host_store(d2h_stream: DeviceToHostStream, t: Tensor) -> None:
    """Put a tensor into a stream to the host, as its next one, every time that it runs.

    A run returns `Ir.num_host_transfers` tensors; more overwrite them, from the first.
    TypeError for what is no stream to the host, ValueError for another shape or dtype than its.
    """
    if not isinstance(d2h_stream, DeviceToHostStream):
        raise TypeError(f"d2h_stream must be a DeviceToHostStream, got {d2h_stream!r}")
    if isinstance(t, Tensor):
        if t.dtype is not d2h_stream.dtype:
            raise ValueError(
                f"dtype of stream {d2h_stream.tensor_id} `{d2h_stream.dtype}` does not match dtype "
                f"of provided tensor `{t.dtype}`"
            )
        if t.shape != d2h_stream.shape:
            raise ValueError(
                f"shape of stream {d2h_stream.tensor_id} `{d2h_stream.shape}` does not match shape "
                f"of provided tensor `{t.shape}`"
            )
    add_op(HOST_STORE, [t], {"stream": d2h_stream})
