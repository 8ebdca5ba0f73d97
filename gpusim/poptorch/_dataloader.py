"""PopTorch's name of the module with AsynchronousWorker, which is gpusim.poptorch.data."""

from __future__ import annotations

from .data import AsynchronousWorker

__all__ = ["AsynchronousWorker"]
