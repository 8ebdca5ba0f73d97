"""ops.host_load: the next tensor of a stream."""

from __future__ import annotations

from .._ops.definition import add_op
from .._ops.hosting import HOST_LOAD
from ..streams import HostToDeviceStream
from ..tensor import Tensor

__all__ = ["host_load"]


def host_load(h2d_stream: HostToDeviceStream, name: str | None = None) -> Tensor:
    """The next tensor of a stream from the host, every time that it runs.

    A run provides `Ir.num_host_transfers` tensors; after the last one the first comes again.
    TypeError for what is no stream from the host.
    """
    if not isinstance(h2d_stream, HostToDeviceStream):
        raise TypeError(f"h2d_stream must be a HostToDeviceStream, got {h2d_stream!r}")
    given = name or h2d_stream.tensor_id
    return add_op(HOST_LOAD, [], {"stream": h2d_stream}, name, output_names=[given])[0]
