"""Which open files and processes are gpusim's, among those of the process that runs the tests.

Other threads of that process open files and start processes too, at any time. Tests for leaks
therefore record the pipes, sockets and processes that code of gpusim makes, and look for those.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpusim
from tests.oracles.machine_time import until
from tests.torch.children import children

PACKAGE = str(Path(gpusim.__file__).parent) + os.sep


def of_gpusim() -> bool:
    """Whether code of gpusim is among the callers in this thread."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


def open_files() -> Iterator[str]:
    """What the descriptors of this process refer to: a path, or `socket:[12]`."""
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            yield os.readlink(each)


def busy_threads() -> int:
    """The number of gpusim's threads, without those that are kept for the next launch."""
    return sum(thread.name.startswith("gpusim") for thread in threading.enumerate())


class Owned:
    """The pipes, sockets and processes that gpusim makes while the patch lasts."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: set[str] = set()  # names as in `open_files`; a kernel does not use them again
        self.processes: set[int] = set()
        initialize: Callable[..., None] = socket.socket.__init__
        pipe, fork = os.pipe, os.fork

        def initialize_and_note(made: socket.socket, *arguments: Any, **named: Any) -> None:
            initialize(made, *arguments, **named)
            self._note(made.fileno())

        def pipe_and_note() -> tuple[int, int]:
            ends = pipe()
            self._note(*ends)
            return ends

        def fork_and_note() -> int:
            process = fork()
            if process and of_gpusim():
                self.processes.add(process)
            return process

        patch.setattr(socket.socket, "__init__", initialize_and_note)
        patch.setattr(os, "pipe", pipe_and_note)
        patch.setattr(os, "fork", fork_and_note)

    def _note(self, *descriptors: int) -> None:
        if of_gpusim():
            self.made |= {os.readlink(f"/proc/self/fd/{each}") for each in descriptors}

    def open(self, *others: str) -> list[str]:
        """The open files that are gpusim's, or whose names contain one of the others."""
        return [
            each
            for each in open_files()
            if each in self.made or "memfd:gpusim" in each or any(map(each.__contains__, others))
        ]


@contextlib.contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """Assert that of a launch in the body no process, socket, pipe, or file in a folder is left."""
    with pytest.MonkeyPatch.context() as patch:
        owned = Owned(patch)
        yield
    assert not owned.processes & children()
    # Errors lie in cycles with their frames, and a thread may yet leave its last frame.
    gone = until(lambda: gc.collect() >= 0 and not owned.open(str(folder)))
    assert gone, owned.open(str(folder))
