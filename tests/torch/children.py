"""The processes that a test has started."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

#: For tests whose ranks are processes: they share memory by Linux's memfd, and fork.
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="processes need Linux")


def children() -> set[int]:
    """The processes that this one has started."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found.update(map(int, (task / "children").read_text().split()))
    return found
