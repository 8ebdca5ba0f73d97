"""PopTorch's DataLoader, and AsynchronousDataAccessor, which loads in another process.

- `loader`, `accessor`: these two. `partition`: the elements of each process and epoch.
- `asynchronous_worker`: the worker process as the accessor sees it. `worker`: what runs there.
- `transport`: datasets and elements on their way. `elements`: checked, joined, rebatched.
"""

from __future__ import annotations

from .accessor import AsynchronousDataAccessor
from .asynchronous_worker import AsynchronousWorker
from .loader import DataLoader
from .partition import Partition

__all__ = ["AsynchronousDataAccessor", "AsynchronousWorker", "DataLoader", "Partition"]
