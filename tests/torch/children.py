"""The processes that a test has started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

import pytest

#: For tests whose ranks are processes: they share memory by Linux's memfd, and fork.
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="processes need Linux")

#: Of Linux's prctl: the signal that a process gets when the thread that has forked it ends.
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # before the forks


def die_with(parent: int) -> None:
    """End this process when its parent ends. To be called first after a fork."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended before the call
        os._exit(1)


def children() -> set[int]:
    """The processes that this one has started."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found.update(map(int, (task / "children").read_text().split()))
    return found
