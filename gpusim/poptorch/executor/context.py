"""`isRunningOnIpu`, and the release of devices when the program ends."""

from __future__ import annotations

import atexit
import weakref
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


class on_ipu:
    """A block in which `isRunningOnIpu` is true; replicas' threads copy that.

    The caller's inference mode is off inside: tensors that are computed there outlive it.
    """

    def __enter__(self) -> None:
        self._token = _on_ipu.set(True)
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference is not None:
            self._inference.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._inference is not None:
            self._inference.__exit__(*error)
        _on_ipu.reset(self._token)


@atexit.register
def poptorchAtExit() -> None:
    """Release all devices; called when the program ends, and harmless before that."""
    for executor in list(living):
        executor._release()
