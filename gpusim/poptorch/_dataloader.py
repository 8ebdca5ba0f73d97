"""PopTorch's name for the module that AsynchronousWorker is in; it is gpusim.poptorch.data."""

from __future__ import annotations

from .data import AsynchronousWorker

__all__ = ["AsynchronousWorker"]
