"""Fixtures of tests that fork ranks."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def memory_is_returned() -> Iterator[None]:
    """To the system: the allocator keeps gigabytes after large launches, and forks copy tables."""
    yield
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)
