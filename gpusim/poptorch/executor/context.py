"""`isRunningOnIpu`, and the release of devices when the program ends."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

__all__ = ["isRunningOnIpu", "living", "on_ipu", "poptorchAtExit"]

_on_ipu: ContextVar[bool] = ContextVar("poptorch on IPU", default=False)

#: Executors that have not been collected: their devices are released at the end.
living: weakref.WeakSet[Any] = weakref.WeakSet()


def isRunningOnIpu() -> bool:
    """Whether this is the forward of a wrapped model, run for an IPU.

    >>> isRunningOnIpu()
    False
    """
    return _on_ipu.get()


@contextmanager
def on_ipu() -> Iterator[None]:
    """`isRunningOnIpu` is true inside; replicas' threads copy that.

    The caller's inference mode is off inside: tensors that are computed there outlive it.
    """
    token = _on_ipu.set(True)
    try:
        with torch.inference_mode(False):
            yield
    finally:
        _on_ipu.reset(token)


@atexit.register
def poptorchAtExit() -> None:
    """Release all devices; called when the program ends, and harmless before that."""
    for executor in list(living):
        executor._release()
