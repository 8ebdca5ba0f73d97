"""Faults of files: a write that is torn or lost, and the rank dies, as a machine without power.

A rank's files are numbered from 1 as the program opens them for writing, whatever thread does.
Python's own files, shared libraries and caches have no number. Files that are written by several
threads of the program's own have the order of their threads; torch.distributed.checkpoint's threads
write one after the other here.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.jit

from ..checks.opens import SAFETENSORS, counts, is_of_library
from ..own.imports import when_imported
from ..private import replace
from . import watching
from .happened import Happened
from .plans import Fault

__all__ = ["AT_WRITE", "faulty_files"]

AT_WRITE = frozenset({"torn", "missing"})
"""The kinds that come as a file has been written."""

WRITES = frozenset("wax+")
"""The letters of a mode that opens a file for writing."""


@contextmanager
def faulty_files(faults: Sequence[Fault], happened: Happened) -> Iterator[None]:
    """A block of the rank's program, in its process, in which files are numbered and get lost.

    **Arguments**: `faults` are the rank's, in this attempt; kinds that are not of files are left
    alone. `happened` is told when one comes.

    A file that a fault names is written and closed by the program; then it is cut, or removed, and
    the process ends by SIGKILL: what other files hold in buffers is lost too.
    """
    mine = [fault for fault in faults if fault.kind in AT_WRITE]
    if not mine and not watching.is_asked():
        yield
        return
    with ExitStack() as stack:
        _Files(mine, happened).install(stack)
        yield


# In the rank's process. Any thread of the program opens files: `_lock` guards the count, and is
# held for no longer.
class _Files:
    """The files that the rank's program opens for writing."""

    def __init__(self, faults: Sequence[Fault], happened: Happened) -> None:
        self.faults = {fault.write: fault for fault in faults}
        self.happened = happened
        self.home = os.getpid()
        self.count = 0
        self._lock = threading.Lock()
        # `busy`: in a function that opens a file which has its number already.
        self._local = threading.local()
        #: Descriptors that the program has opened by os.open, of the files that faults name.
        self._open: dict[int, tuple[Fault, str]] = {}

    def install(self, stack: ExitStack) -> None:
        """Be called for all files until the stack ends."""
        from ..private_files import write_in_order

        write_in_order(stack)
        opens = self._opening(builtins.open)
        # One function by three names, each of which programs look up.
        for owner in (builtins, io, sys.modules["_io"]):
            replace(stack, owner, "open", opens)
        replace(stack, os, "open", self._opening_descriptor(os.open))
        replace(stack, os, "close", self._closing_descriptor(os.close))
        # C++ and Rust open files where Python does not see it.
        for owner in (torch, torch.serialization, torch.jit):
            replace(stack, owner, "save", self._writing(vars(owner)["save"], 1, "f"))

        def change(module: ModuleType) -> None:
            # By its own functions, also those that were imported from it before.
            real = vars(module).get("serialize_file")
            if real is not None:
                replace(stack, module, "serialize_file", self._writing(real, 1, "filename"))

        when_imported(stack, SAFETENSORS, change)

    # Numbers

    def _number(self, path: str) -> Fault | None:
        """Count a file that is opened for writing; the fault that names it."""
        if os.getpid() != self.home or not self._counts(path):
            return None
        with self._lock:
            self.count += 1
            watching.saw_write(path)
            return self.faults.get(self.count)

    def _counts(self, path: str) -> bool:
        # torchrun's file for the rank's error is not the program's.
        own = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if own and os.path.realpath(own) == path:
            return False
        return counts(path) and not watching.is_own(path) and not is_of_library(sys._getframe(2))

    @contextmanager
    def _nested(self) -> Iterator[bool]:
        """A block that opens one file; whether it has its number already."""
        was = getattr(self._local, "busy", False)
        self._local.busy = True
        try:
            yield was
        finally:
            self._local.busy = was

    # Functions that open files

    def _opening(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Serve `open`."""

        @functools.wraps(real)
        def serve(file: Any, mode: Any = "r", *args: Any, **named: Any) -> Any:
            with self._nested() as nested:
                opened = real(file, mode, *args, **named)
            if nested or not isinstance(mode, str) or not WRITES & set(mode):
                return opened
            descriptor = opened.fileno()
            known = self._open.pop(descriptor, None)  # of os.open, which has counted it
            path = _path_of(descriptor)
            fault = known[0] if known else self._number(path) if _is_new(file) else None
            if fault is not None:
                _when_closed(opened, functools.partial(self._lose, fault, path))
            return opened

        return serve

    def _opening_descriptor(self, real: Callable[..., int]) -> Callable[..., int]:
        """Serve `os.open`."""

        @functools.wraps(real)
        def serve(path: Any, flags: int, *args: Any, **named: Any) -> int:
            descriptor = real(path, flags, *args, **named)
            if flags & (os.O_WRONLY | os.O_RDWR) and not getattr(self._local, "busy", False):
                where = _path_of(descriptor)
                fault = None if os.path.isdir(where) else self._number(where)
                if fault is not None:
                    self._open[descriptor] = fault, where
            return descriptor

        return serve

    def _closing_descriptor(self, real: Callable[[int], None]) -> Callable[[int], None]:
        """Serve `os.close`."""

        @functools.wraps(real)
        def serve(fd: int) -> None:
            real(fd)
            found = self._open.pop(fd, None) if os.getpid() == self.home else None
            if found is not None:
                self._lose(*found)

        return serve

    def _writing(self, real: Callable[..., Any], place: int, name: str) -> Callable[..., Any]:
        """Serve a function that writes a whole file; this argument is its path."""

        @functools.wraps(real)
        def serve(*args: Any, **named: Any) -> Any:
            file = args[place] if len(args) > place else named.get(name)
            if not isinstance(file, str | os.PathLike) or getattr(self._local, "busy", False):
                return real(*args, **named)
            path = os.path.realpath(file)
            fault = self._number(path)
            with self._nested():
                result = real(*args, **named)
            if fault is not None:
                self._lose(fault, path)
            return result

        return serve

    # The end

    def _lose(self, fault: Fault, path: str) -> None:
        """Do to a file what the fault says, and end the process."""
        if os.getpid() != self.home:
            return
        self.happened.note(fault)
        watching.happened(fault)
        if fault.kind == "missing":
            os.unlink(path)
        else:
            size = os.stat(path).st_size
            left = size // 2 if fault.bytes is None else fault.bytes
            os.truncate(path, min(left, size))
        os.kill(os.getpid(), signal.SIGKILL)


def _is_new(file: Any) -> bool:
    """Whether `open` opens a file, and does not take over a descriptor that counts otherwise.

    One of `tempfile.mkstemp`, `os.open`'s, was counted there.
    """
    return not isinstance(file, int)


def _path_of(descriptor: int) -> str:
    """The real path of an open file."""
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _when_closed(opened: Any, act: Callable[[], None]) -> None:
    """Do something as soon as the file is closed: by `close`, the end of a `with`, or its end.

    Python's own classes look `close` up on the object.
    """
    kind = type(opened)
    # The object must not hold itself: its last reference closes the file, and not a later
    # collection. Python closes it while weak references still find it.
    own = weakref.ref(opened)

    def close() -> None:
        file = own()
        if file is not None and not file.closed:
            kind.close(file)
            act()

    opened.close = close
