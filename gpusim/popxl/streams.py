"""Streams between host and replicas, for `host_load` and `host_store`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from .context import get_main_graph
from .dtypes import dtype
from .tensor import TensorSpec

__all__ = ["DeviceToHostStream", "HostToDeviceStream", "Stream", "d2h_stream", "h2d_stream"]

S = TypeVar("S", bound="Stream")


class Stream:
    """A stream of tensors of one shape and dtype."""

    _id: str
    _spec: TensorSpec

    def __init__(self) -> None:
        raise NotImplementedError(
            "Cannot construct a popxl.Stream directly. Use `h2d_stream` or `d2h_stream`."
        )

    @property
    def dtype(self) -> dtype:
        """The dtype of its tensors."""
        return self._spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its tensors."""
        return self._spec.shape

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype of its tensors."""
        return self._spec

    @property
    def tensor_id(self) -> str:
        """Its id in the Ir."""
        return self._id

    def __repr__(self) -> str:
        return f"{type(self).__name__}[{self._id} {self.dtype} {self.shape}]"


class HostToDeviceStream(Stream):
    """A stream that replicas read."""


class DeviceToHostStream(Stream):
    """A stream that replicas write."""


def h2d_stream(shape: Iterable[int], dtype: dtype, name: str | None = None) -> HostToDeviceStream:
    """A new stream from the host; RuntimeError outside of a graph.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.h2d_stream((2, 3), popxl.float16, "images")
    HostToDeviceStream[images popxl.dtypes.float16 (2, 3)]
    """
    return _create(HostToDeviceStream, shape, dtype, name or "h2d_stream")


def d2h_stream(shape: Iterable[int], dtype: dtype, name: str | None = None) -> DeviceToHostStream:
    """A new stream to the host; RuntimeError outside of a graph."""
    return _create(DeviceToHostStream, shape, dtype, name or "d2h_stream")


def _create(kind: type[S], shape: Iterable[int], dtype: dtype, name: str) -> S:
    stream = object.__new__(kind)
    stream._id = get_main_graph()._ir._stream_id(name)
    stream._spec = TensorSpec(shape, dtype)
    return stream
