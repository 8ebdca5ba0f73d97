"""Digests of arrays, and a folder of arrays that keeps to a limit."""

from __future__ import annotations

import os
import warnings
import zipfile
import zlib
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..files import atomic_write

__all__ = ["ArrayFolder", "digest_of", "raw_bytes"]

WINDOW = 8 << 20
"""Bytes of arrays that are written as one file."""

BLOCK = 1 << 18
"""Bytes that are read twice while they are in the cache; a multiple of four."""

Raw = NDArray[np.uint8]


def raw_bytes(array: NDArray[Any]) -> Raw:
    """The bytes of an array's elements in C order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def digest_of(raw: Raw) -> str:
    """The digest of an array's bytes: 16 hexadecimal digits.

    The first eight are the CRC-32 (zlib's) of the bytes. The others are the sum of the bytes as
    little-endian 32-bit words, modulo 2**32; missing bytes of the last word are zero. It is not
    cryptographic: it finds accidents, not forgeries.

    >>> digest_of(raw_bytes(np.array([1.0, 2.0], np.float32)))
    'd14b053f7f800000'
    """
    check = total = 0
    whole = raw.size & ~3
    for begin in range(0, whole, BLOCK):
        block = raw[begin : min(begin + BLOCK, whole)]
        check = zlib.crc32(block.data, check)
        total += int(np.add.reduce(block.view("<u4"), dtype=np.uint32))
    rest = raw[whole:].tobytes()
    total += int.from_bytes(rest, "little")
    return f"{zlib.crc32(rest, check):08x}{total & 0xFFFFFFFF:08x}"


class ArrayFolder:
    """Arrays by their digest, in .npz files of several megabytes; the oldest files are removed.

    What is not yet written is lost in a kill; each file that is there is whole. If the disk takes
    no more, arrays are no longer kept, with a RuntimeWarning.

    **Arguments**:

    - `folder`: made if missing.
    - `prefix`: begins the names of the files, one for each process that writes.
    - `limit`: how many bytes the files may have together.

    >>> folder = ArrayFolder(getfixture("tmp_path") / "arrays", "", 1 << 20)
    >>> raw = raw_bytes(np.arange(3.0))
    >>> folder.add(digest_of(raw), raw)
    >>> folder.flush()
    >>> [path.name for path in folder.folder.iterdir()]
    ['000000.npz']
    """

    def __init__(self, folder: Path, prefix: str, limit: int) -> None:
        self.folder, self.prefix, self.limit = folder, prefix, limit
        folder.mkdir(exist_ok=True)
        for old in folder.glob(f"{prefix}[0-9]*.npz"):
            old.unlink()
        self._waiting: dict[str, Raw] = {}
        self._bytes = 0
        self._written = 0
        self._files: deque[tuple[Path, int]] = deque()
        self._ended = False

    def add(self, digest: str, raw: Raw) -> None:
        """Keep a copy of an array's bytes."""
        if self._ended or digest in self._waiting:
            return
        self._waiting[digest] = raw.copy()
        self._bytes += raw.size
        if self._bytes >= min(WINDOW, max(self.limit // 4, 1)):
            self.flush()

    def flush(self) -> None:
        """Write what is waiting."""
        waiting, self._waiting, self._bytes = self._waiting, {}, 0
        if not waiting or self._ended:
            return
        path = self.folder / f"{self.prefix}{self._written:06}.npz"
        try:
            with atomic_write(path, "wb") as file:
                with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                    for digest, raw in waiting.items():
                        with archive.open(f"{digest}.npy", "w", force_zip64=True) as entry:
                            np.lib.format.write_array(entry, raw, allow_pickle=False)
                size = file.tell()
                self._make_room(size)
        except OSError as error:
            self._ended = True
            warnings.warn(f"no more arrays in {self.folder}: {error}", RuntimeWarning, stacklevel=2)
            return
        self._files.append((path, size))
        self._written += 1
        if size > self.limit:
            self._make_room(0)
            warnings.warn(
                f"arrays of {size:,} bytes exceed the limit of {self.limit:,} and are not kept",
                RuntimeWarning,
                stacklevel=2,
            )

    def _make_room(self, size: int) -> None:
        """Remove the oldest files until one of this size fits."""
        while self._files and sum(each for _, each in self._files) + size > self.limit:
            path, _ = self._files.popleft()
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
