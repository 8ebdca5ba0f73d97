"""Fixtures of tests that fork ranks."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tests.torch.children import children


@pytest.fixture
def hanging_processes_are_shown() -> Iterator[None]:
    """Their stacks are among what the test prints; pytest itself shows this process's only."""

    def show_and_end() -> None:
        for signal_number in (signal.SIGUSR1, signal.SIGKILL):
            for child in children():
                os.kill(child, signal_number)
            time.sleep(2)

    faulthandler.register(signal.SIGUSR1, file=2)  # also of processes that are forked
    timer = threading.Timer(300, show_and_end)  # before faulthandler_timeout
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()
    faulthandler.unregister(signal.SIGUSR1)


@pytest.fixture
def memory_is_returned() -> Iterator[None]:
    """To the system: the allocator keeps gigabytes after large launches, and forks copy tables."""
    yield
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)
