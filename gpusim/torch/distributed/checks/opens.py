"""The check's view of a rank's files: from Python's audit events, and where C++ opens them."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.jit

from ..own.imports import when_imported
from ..own.threads import rank_of_thread
from .here import replace

__all__ = ["counts", "install", "is_of_library", "mode_of"]

OUTSIDE = ("/dev/", "/proc/", "/sys/", sysconfig.get_path("stdlib") + os.sep)
PARTS = ("__pycache__", "site-packages", "dist-packages", ".cache", ".triton", ".nv", ".git")
STARTS = ("torchinductor_", "gpusim-check-")
ENDS = (".py", ".pyc", ".pyi", ".so", ".lock", ".toml", ".cubin", ".ptx")
"""Files that programs do not exchange: of Python, of devices, of caches that order themselves."""

LIBRARIES = (
    "datasets",
    "filelock",
    "huggingface_hub",
    "matplotlib",
    "torch._dynamo",
    "torch._inductor",
    "torch.utils.cpp_extension",
    "triton",
)
"""Modules that order what they write among processes, by locks or by renaming."""

SAFETENSORS = ("safetensors.torch", "safetensors.numpy")
"""Modules whose functions open files where Python does not see it."""


@functools.lru_cache(4096)
def counts(path: str) -> bool:
    """Whether ranks may exchange something by the file of this absolute path."""
    if path.startswith(OUTSIDE) or path.endswith(ENDS):
        return False
    parts = path.split(os.sep)
    return not any(part in PARTS or part.startswith(STARTS) for part in parts)


def is_of_library(frame: FrameType | None) -> bool:
    """Whether a module of `LIBRARIES` opens the file."""
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        if name.startswith(LIBRARIES) and "-packages" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def mode_of(mode: Any, flags: int) -> str:
    """How a file is opened: "r", "w" anew, "u" to be changed in part, "a" or "x", if it is new."""
    if flags & os.O_EXCL and flags & os.O_CREAT:
        return "x"
    if flags & os.O_APPEND or (isinstance(mode, str) and "a" in mode):
        return "a"
    if flags & (os.O_WRONLY | os.O_RDWR):
        return "w" if flags & os.O_TRUNC else "u"
    return "r"


class _Hook:
    """The process's hook. Python keeps it for ever, so that it is added once.

    `users` counts the blocks that listen.
    """

    users = 0
    is_added = False


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if not _Hook.users or event not in EVENTS:
        return
    rank = rank_of_thread()
    watch = None if rank is None else rank.watch
    if watch is None:
        return
    # An error here would be the program's.
    with suppress(OSError, ValueError, TypeError, AttributeError):
        EVENTS[event](watch.files, *args)


def _open(files: Any, path: Any, mode: Any, flags: Any) -> None:
    if isinstance(path, int):
        return
    how = mode_of(mode, flags or 0)
    # A folder is written to by a file without a name, which is the process's own.
    if how == "r" or not os.path.isdir(path):
        files.opened(path, how)


def _rename(files: Any, source: Any, target: Any, *rest: Any) -> None:
    files.renamed(target)


def _remove(files: Any, path: Any, *rest: Any) -> None:
    files.removed(path)


def _lock(files: Any, file: Any, operation: Any, *rest: Any) -> None:
    if isinstance(file, int) and isinstance(operation, int):
        files.locked(file, operation)


def _control(files: Any, file: Any, command: Any, argument: Any) -> None:
    if isinstance(argument, bytes):
        files.locked(file, 0)


EVENTS: dict[str, Callable[..., None]] = {
    "open": _open,
    "os.rename": _rename,
    "os.remove": _remove,
    "fcntl.flock": _lock,
    "fcntl.lockf": _lock,
    "fcntl.fcntl": _control,
}


def _opening(mode: str, place: int, name: str) -> Callable[..., Any]:
    """Serve a function that opens a file; the argument of this place and name is its path."""

    def call(watch: Any, real: Any, /, *args: Any, **named: Any) -> Any:
        file = args[place] if len(args) > place else named.get(name)
        if isinstance(file, str | os.PathLike):
            watch.files.opened(file, mode)
        return real(*args, **named)

    return call


def _ask(watch: Any, real: Any, /, path: Any = ".", *args: Any, **named: Any) -> Any:
    answer = real(path, *args, **named)
    if not isinstance(path, int) and answer is not False:
        watch.files.seen(path)
    return answer


def install(stack: ExitStack) -> None:
    """Hear of files until the stack ends."""
    if not _Hook.is_added:
        _Hook.is_added = True
        sys.addaudithook(_hear)
    _Hook.users += 1
    stack.callback(_leave)
    for owner in (torch, torch.jit):
        replace(stack, owner, "save", _opening("w", 1, "f"))
    for name in ("access", "listdir", "stat"):
        replace(stack, os, name, _ask)

    def change(module: ModuleType) -> None:
        replace(stack, module, "save_file", _opening("w", 1, "filename"))
        replace(stack, module, "load_file", _opening("r", 0, "filename"))

    when_imported(stack, SAFETENSORS, change)


def _leave() -> None:
    _Hook.users -= 1
