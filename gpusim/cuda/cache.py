"""Results that threads share, each made once; and machine code on disk, shared by processes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable
from functools import update_wrapper
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

from ..files import atomic_write
from ..platforms import user_id

Result = TypeVar("Result")
ENVIRONMENT = "GPUSIM_CACHE_DIR"
_DIGEST = hashlib.sha256().digest_size


class once(Generic[Result]):
    """Keep a function's results. One thread computes each, and others that need it wait.

    Different results are computed in parallel. An exception is not kept.
    """

    def __init__(self, function: Callable[..., Result]) -> None:
        self._function = function
        self._results: dict[Hashable, Result] = {}
        self._locks: dict[Hashable, Lock] = {}
        update_wrapper(self, function)
        if hasattr(os, "register_at_fork"):  # a child lacks the threads that hold the locks
            os.register_at_fork(after_in_child=self._locks.clear)

    def __call__(self, *arguments: Hashable) -> Result:
        if arguments not in self._results:
            with self._locks.setdefault(arguments, Lock()):
                if arguments not in self._results:
                    self._results[arguments] = self._function(*arguments)
        return self._results[arguments]

    def cache_clear(self) -> None:
        """Drop all results."""
        self._results.clear()


def folder() -> Path | None:
    """The folder of the cache: $GPUSIM_CACHE_DIR, or gpusim in the user's folder of caches.

    None if the variable is empty, or if the user has no home folder.
    """
    given = os.environ.get(ENVIRONMENT)
    if given is not None:
        return Path(given).absolute() if given else None
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(caches):  # the standard ignores relative paths
        caches = os.path.expanduser("~/.cache")
    return Path(caches) / "gpusim" if os.path.isabs(caches) else None


def cached(key: str, make: Callable[[], bytes]) -> bytes:
    """The file of this key, or what `make` returns, which becomes that file.

    A file that is damaged is made anew. Where the folder cannot be written, or where other users
    can write to it, nothing is read or kept.
    """
    place = folder()
    if place is None or not _is_private(place):
        return make()
    path = place / key
    found = _read(path)
    if found is None:
        found = make()
        try:
            with atomic_write(path, "wb") as file:
                file.write(found + hashlib.sha256(found).digest())
        except OSError:  # a full disk, or a folder that is read-only
            pass
    return found


def _is_private(place: Path) -> bool:
    """Whether the folder, made if needed, is the user's and no others can write to it."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = place.stat()
    except OSError:
        return False
    return status.st_uid == user_id() and not status.st_mode & 0o022


def _read(path: Path) -> bytes | None:
    """Read a file and check the digest at its end; None if it is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    made, digest = content[:-_DIGEST], content[-_DIGEST:]
    return made if hashlib.sha256(made).digest() == digest else None
