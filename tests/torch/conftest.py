"""Fixtures of tests that fork ranks."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def autograd_has_no_threads() -> None:
    """The first backward pass starts a thread for each device, and then no rank can fork.

    PyTorch's build for CUDA plays 8 devices, from the first fake tensor on, where there are none.
    """
    if not torch.cuda.is_available():
        torch.ones(1, requires_grad=True).sum().backward()


@pytest.fixture
def memory_is_returned() -> Iterator[None]:
    """To the system: the allocator keeps gigabytes after large launches, and forks copy tables."""
    yield
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)
