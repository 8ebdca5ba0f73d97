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

__all__ = ["ArrayFolder", "digest_of", "raw_bytes", "with_one_nan"]

WINDOW = 8 << 20
"""Bytes of arrays that are written as one file."""

BLOCK = 1 << 18
"""Bytes that are read twice while they are in the cache; a multiple of four."""

NANS = {
    "float8_e4m3fn": ("<u1", 0x7E, 0x7F),
    "float8_e5m2": ("<u1", 0x7C, 0x7E),
    "float16": ("<u2", 0x7C00, 0x7E00),
    "bfloat16": ("<u2", 0x7F80, 0x7FC0),
    "float32": ("<u4", 0x7F800000, 0x7FC00000),
    "float64": ("<u8", 0x7FF << 52, 0xFFF << 51),
}
"""Dtypes of several NaNs: their words, the largest magnitude of a number, and NumPy's NaN."""
NANS |= {"complex32": NANS["float16"], "complex64": NANS["float32"], "complex128": NANS["float64"]}

Raw = NDArray[np.uint8]


def raw_bytes(array: NDArray[Any]) -> Raw:
    """The bytes of an array's elements in C order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def with_one_nan(raw: Raw, dtype: str) -> Raw:
    """The bytes of elements of a dtype, by torch's name, with NumPy's NaN in place of all NaNs.

    Which NaN a result is, is not specified: a GPU's have other bits than a CPU's.

    >>> nan, minus = np.float32(np.nan), -np.float32(np.nan)
    >>> one, other = (with_one_nan(raw_bytes(np.array([x, 1])), "float32") for x in (nan, minus))
    >>> digest_of(one) == digest_of(other)
    True
    """
    if dtype not in NANS:
        return raw
    word, largest, nan = NANS[dtype]
    words = given = raw.view(word)
    block = BLOCK // words.itemsize
    magnitudes = np.empty(min(block, words.size), word)
    mask = words.dtype.type((1 << (8 * words.itemsize - 1)) - 1)
    for begin in range(0, words.size, block):
        here = given[begin : begin + block]
        found = np.bitwise_and(here, mask, out=magnitudes[: here.size])
        if found.max() > largest:
            words = given.copy() if words is given else words
            words[begin : begin + block][found > largest] = nan
    return words.view(np.uint8)


def digest_of(raw: Raw) -> str:
    """The digest of an array's bytes: 16 hexadecimal digits.

    The first eight are the CRC-32 (zlib's) of the bytes. The others are the sum of the bytes as
    little-endian 32-bit words, modulo 2**32; missing bytes of the last word are zero. It is not
    cryptographic: it finds accidents, not forgeries.

    >>> digest_of(raw_bytes(np.array([1.0, 2.0], np.float32)))
    '2e3fa5767f800000'
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
