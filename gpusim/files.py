"""Atomic writing of files, and their end, for all of gpusim; imports nothing of it."""

from __future__ import annotations

import gc
import io
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

__all__ = ["atomic_write", "flush_all", "replace_text"]


@contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file that replaces `path` when the block ends without an exception.

    If the block raises or is interrupted, or the disk is full, the old content stays and nothing
    of the new file is left. A symbolic link stays a link, to the new content. The permissions of
    an existing file are kept.

    **Arguments**:

    - `path`: the file to write.
    - `mode`: that of `open`. Text is UTF-8, and its newlines are written as they are.

    **Returns**: a context manager for the open file.

    **Raises**:

    - OSError: if the path cannot be written, or is not a regular file.

    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> with atomic_write(folder / "table.csv") as file:
    ...     _ = file.write("a,b\\n")
    >>> [(found.name, found.read_text()) for found in folder.iterdir()]
    [('table.csv', 'a,b\\n')]
    """
    target = Path(os.path.realpath(path))
    permissions = 0o666  # less the umask
    if target.exists():
        if not target.is_file():  # a device would be replaced by a file
            raise OSError(f"{path} is not a regular file")
        permissions = target.stat().st_mode & 0o777
    draft = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, permissions)
    text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    try:
        with open(descriptor, mode, **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a power failure could leave the name of an empty file
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Write a text as a whole: who ends the process meanwhile finds the old file, or the new one.

    For the folders of one run: unlike `atomic_write`, it does not wait for the disk, and a process
    that is ended leaves its draft there. One process writes a path.
    """
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def flush_all() -> None:
    """Write what open files of this process hold back, as Python's end does when it frees them."""
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    files = [each for each in gc.get_objects() if type(each) in kinds]
    for kind in kinds:  # texts first, which write to the others
        for each in files:
            if type(each) is kind:
                with suppress(Exception):  # closed, detached, or the disk is full
                    each.flush()
