"""The private names of torch that faults of files use."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

from torch.distributed.checkpoint import filesystem

from .private import replace

__all__ = ["write_in_order"]


def write_in_order(stack: ExitStack) -> None:
    """Have torch.distributed.checkpoint write its files one after the other, until the stack ends.

    Which files there are, and what is in them, is what the writer's number of threads makes of it.
    """
    real = filesystem._FileSystemWriter._write_data

    @functools.wraps(real)
    def write(self: Any, *args: Any, **named: Any) -> Any:
        threads, self.thread_count = self.thread_count, 1
        try:
            return real(self, *args, **named)
        finally:
            self.thread_count = threads

    replace(stack, filesystem._FileSystemWriter, "_write_data", write)
