"""NumPy's files that others wrote, read within bounds; nothing is unpickled."""

from __future__ import annotations

import io
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BROKEN", "Archive", "map_npy"]

#: The errors of NumPy, zipfile and zlib for files that are not what they seem.
BROKEN: tuple[type[Exception], ...] = (
    *(ValueError, TypeError, EOFError, KeyError, IndexError, OverflowError, RecursionError),
    *(SyntaxError, tokenize.TokenError, UnicodeError, MemoryError, AttributeError, AssertionError),
    *(NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error),
)
_FAILURES: tuple[type[Exception], ...] = (OSError, *BROKEN)


def _check(file: IO[bytes], size: int) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    """The dtype, shape and order of a .npy file of so many bytes, and where its elements begin.

    **Raises**: ValueError where they do not fill the file, or are Python's objects.
    """
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"version {version}: expected a .npy file of version 1, 2 or 3")
    length = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
    if length > min(size, 10_000):
        raise ValueError(f"a header of {length} bytes")
    text = file.read(length).decode("latin1" if version < (3, 0) else "utf-8")
    content = text.encode("latin1")  # as that of version 1, with NumPy's own checks
    file_of_it = io.BytesIO(len(content).to_bytes(2, "little") + content)
    header: Any = np.lib.format.read_array_header_1_0(file_of_it)
    shape, is_fortran, dtype = header
    if dtype.hasobject:
        raise ValueError(
            "holds Python objects or is no NumPy file; only arrays of numbers are read"
        )
    begin = file.tell()
    needed = math.prod(shape) * dtype.itemsize
    if any(each < 0 for each in shape):
        raise ValueError(f"a shape of {shape!s:.80}")
    if needed > size - begin:
        raise ValueError("the file is cut off: it holds less than its header says")
    return dtype, shape, is_fortran, begin


def map_npy(path: str | os.PathLike[str]) -> NDArray[Any]:
    """The array of a .npy file, mapped read-only.

    **Raises**: ValueError with the path and a reason, OSError for a file that cannot be read.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "x.npy")
    >>> np.save(path, np.arange(3))
    >>> map_npy(path).tolist()
    [0, 1, 2]
    >>> _ = path.write_bytes(path.read_bytes()[:-1])
    >>> try:
    ...     map_npy(path)
    ... except ValueError as error:
    ...     print(str(error).partition("x.npy: ")[2])
    the file is cut off: it holds less than its header says
    """
    try:
        with open(path, "rb") as file:
            dtype, shape, is_fortran, begin = _check(file, os.fstat(file.fileno()).st_size)
        if not math.prod(shape):
            return np.empty(shape, dtype)
        order: Any = "F" if is_fortran else "C"
        return np.memmap(path, dtype, "r", begin, shape, order)
    except BROKEN as error:
        raise ValueError(f"{os.fspath(path)}: {_reason(error)}") from None


class Archive(Mapping[str, NDArray[Any]]):
    """The arrays of an .npz file by name, each read when it is asked for.

    **Raises**: ValueError with the path, and the array's name, and a reason; OSError for a file
    that cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with zipfile.ZipFile(self.path) as archive:
                self._entries = {
                    one.filename.removesuffix(".npy"): one for one in archive.infolist()
                }
                if len(self._entries) != len(archive.infolist()):
                    raise ValueError("an array is there twice")
        except _FAILURES as error:
            raise self._error("not an .npz file", error) from None

    def __iter__(self) -> Any:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> NDArray[Any]:
        entry = self._entries[name]
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(entry) as file:
                dtype, shape, is_fortran, _ = _check(file, entry.file_size)
                needed = math.prod(shape) * dtype.itemsize
                raw = file.read(needed)  # a bomb is not unpacked further
                if len(raw) < needed:
                    raise ValueError("the file is cut off: it holds less than its header says")
            found = np.frombuffer(bytearray(raw), dtype, math.prod(shape))
            return found.reshape(shape, order="F" if is_fortran else "C")
        except _FAILURES as error:
            raise self._error(repr(name[:80]), error) from None

    def _error(self, what: str, error: Exception) -> Exception:
        """The error of a part; those of the system that name the file are as they are."""
        if isinstance(error, OSError) and error.filename is not None:
            return error
        return ValueError(f"{self.path}: {what}: {_reason(error)}")


def _reason(error: Exception) -> str:
    text = str(error).partition("\n")[0][:200]
    if isinstance(error, MemoryError):
        return "too large for this machine's memory"
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
