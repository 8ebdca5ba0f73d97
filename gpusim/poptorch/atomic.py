"""Files that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, beside the path, that takes the path's place at the end of the block.

    If the block raises, or is interrupted, or the disk is full, what was at the path stays, and
    nothing is left of the new file. A link stays one, to the new content.

    OSError for a path that cannot be written, or that is no ordinary file.
    """
    target = Path(os.path.realpath(path))
    mode = 0o666  # less the umask
    if target.exists():
        if not target.is_file():  # a device would be replaced by a file
            raise OSError(f"{path} is no ordinary file")
        mode = target.stat().st_mode & 0o777
    beside = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")
    descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a power failure could leave the name of an empty file
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
