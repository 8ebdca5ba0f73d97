"""Files that appear whole or not at all, and the checks that are due before hours of work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

__all__ = ["check_target", "replacing"]


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file that takes the place of `path` when all is written, and leaves no trace otherwise."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    text = "b" not in mode
    try:
        with open(
            draft, mode, encoding="utf-8" if text else None, newline="" if text else None
        ) as file:
            yield file
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def check_target(path: Path, suffixes: tuple[str, ...] = ()) -> None:
    """OSError or ValueError, now, where a file could not be written later."""
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{path}: expected a name that ends in {' or '.join(suffixes)}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, expected a file")
    folder = path.parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{path}: the folder {folder} cannot be written")
