"""The order of ranks' work on a GPU that they share, as in NCCL: the host waits for nothing.

A rank that posts a call records an event on its current stream. The last rank does the work for
all, on its own current stream, behind the events of the others. A rank that waits for the call lets
its current stream wait for the event behind that work. Tensors on the host need none of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...tensors import on_stream_of

__all__ = ["after", "futures_on", "is_on_gpu", "record", "wait"]


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def current_stream(tensor: Tensor) -> Any:
    """The stream on which the calling rank works, on the tensor's GPU."""
    return torch.cuda.current_stream(tensor.device)


def record(tensors: Iterable[Tensor]) -> Any:
    """An event behind the calling rank's work so far; None if no tensor is on a GPU."""
    for tensor in tensors:
        if is_on_gpu(tensor):
            return current_stream(tensor).record_event()
    return None


@contextmanager
def after(events: Iterable[Any], tensors: Sequence[Tensor]) -> Iterator[None]:
    """A block whose work on arrays runs behind the events, on the calling rank's stream."""
    tensor = next(filter(is_on_gpu, tensors), None)
    if tensor is None:
        yield
        return
    stream = current_stream(tensor)
    for event in events:
        if event is not None:
            stream.wait_event(event)
    with on_stream_of([tensor]):
        yield


def wait(event: Any, tensors: Iterable[Tensor]) -> None:
    """Let the calling rank's stream wait for an event, if there is one."""
    if event is not None:
        current_stream(next(filter(is_on_gpu, tensors))).wait_event(event)


def futures_on(tensors: Iterable[Tensor]) -> list[Any]:
    """The devices that a future of these tensors names: GPUs only."""
    return list({tensor.device for tensor in tensors if is_on_gpu(tensor)})
