"""The folders of runs: copies of the working folder, and digests of the files that a run leaves."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from gpusim.tools.options import UsageError

__all__ = ["PLACE", "check_size", "copy_folder", "digests", "stamps"]

PLACE = "{folder}"
"""Stands in the script's arguments for the folder that each run has for itself."""

MOST_FILES = 10_000
MOST_BYTES = 1 << 30
"""How many files that a run leaves are compared, and how large they are in all."""

COPIED, MOST_COPIED = 1 << 22, 500
"""The largest working folder that is copied for each run, in bytes and files."""


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The regular files of a folder by name, in order."""
    for around, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(around, name)
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and "__pycache__" not in path:
                yield os.path.relpath(path, folder), status


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Sizes and times of the files of a folder, to see later which are written."""
    return {name: (own.st_size, own.st_mtime_ns) for name, own in _files(folder)}


def digests(folder: Path, before: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """Digests of the files that were written since `before`, up to a number and a size."""
    found: dict[str, str] = {}
    size = 0
    for name, status in _files(folder):
        if before.get(name) == (status.st_size, status.st_mtime_ns):
            continue
        size += status.st_size
        if len(found) >= MOST_FILES or size > MOST_BYTES:
            break
        with open(folder / name, "rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()[:32]
    return found


def _hidden(folder: str, names: list[str]) -> set[str]:
    """The names of a working folder that are not copied."""
    return {name for name in names if name.startswith(".") or name == "__pycache__"}


def check_size(folder: Path) -> None:
    """UsageError if the working folder is too large to be copied for each run."""
    size = count = 0
    for around, folders, names in os.walk(folder):
        hidden = _hidden(around, folders)
        folders[:] = [name for name in folders if name not in hidden]
        count += len(names)
        size += sum(os.lstat(os.path.join(around, name)).st_size for name in names)
        if size > COPIED or count > MOST_COPIED:
            raise UsageError(
                f"--faults seed=S: each run begins in a copy of the working folder, which has more "
                f"than {COPIED >> 20} MiB or {MOST_COPIED} files; write {PLACE} in the script's "
                f"arguments where it has the folder of its checkpoints, and it runs here"
            )


def copy_folder(home: Path, folder: Path) -> None:
    """Copy a working folder, without hidden files."""
    shutil.copytree(home, folder, symlinks=True, ignore=_hidden, dirs_exist_ok=True)
