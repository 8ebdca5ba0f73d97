"""PopTorch's DataLoader, and AsynchronousDataAccessor, which loads in a process of its own.
Sources of elements, their way between processes, and who gets which of them."""

from __future__ import annotations

from .accessor import AsynchronousDataAccessor
from .asynchronous_worker import AsynchronousWorker
from .loader import DataLoader
from .partition import Partition

__all__ = ["AsynchronousDataAccessor", "AsynchronousWorker", "DataLoader", "Partition"]
