"""Names of PopTorch's internal module `poptorch._impl` that programs use."""

from __future__ import annotations

from .poptorch_core import createPoptorchError, isCompilingWithDispatcher

__all__ = ["createPoptorchError", "isDispatchTracing"]


def isDispatchTracing() -> bool:
    """Whether this is the forward of a wrapped model; see `poptorch.isRunningOnIpu`.

    >>> isDispatchTracing()
    False
    """
    return isCompilingWithDispatcher()
