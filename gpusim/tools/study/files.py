"""Arrays from users' files: .npy and .safetensors are mapped, .npz is read.

Nothing is ever unpickled. The header of a file is checked before it is used.
"""

from __future__ import annotations

import fnmatch
import json
import math
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["read_arrays"]

Tensors = dict[str, Callable[[], NDArray[Any]]]

# The dtypes that the format's definition lists, and ml_dtypes or NumPy have.
SAFETENSORS: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    **{f"{sign}{8 * n}": np.dtype(f"<{sign.lower()}{n}") for sign in "IU" for n in (1, 2, 4, 8)},
    "BOOL": np.dtype(np.bool_),
}
HEADER_LIMIT = 100_000_000  # bytes; the format's own


def read_arrays(path: Path, tensor: str | None = None) -> dict[str, NDArray[Any]]:
    """The arrays of a file that `tensor` names, by name; that of a .npy file is "".

    **Arguments**:

    - `path`: a .npy, .npz or .safetensors file.
    - `tensor`: a name, or a pattern as of file names: "*" is all arrays. None: the only array.

    **Raises**: OSError if the file cannot be read, ValueError if it holds no such array of numbers.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: expected a file named {', '.join(f'*{s}' for s in READERS)}")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    tensors = reader(path)
    if tensor is None:
        chosen = list(tensors) if len(tensors) == 1 else []
    else:
        alike = [name for name in tensors if fnmatch.fnmatchcase(name, tensor)]
        chosen = [tensor] if tensor in tensors else alike
    if not chosen and list(tensors) == [""]:
        raise ValueError(f"{path} holds one array without a name: {tensor!r} given with --tensor")
    if not chosen:
        problem = f"has no array {tensor!r}" if tensor else f"holds {len(tensors)} arrays"
        names = ", ".join(list(tensors)[:20]) + (", ..." if len(tensors) > 20 else "")
        raise ValueError(
            f"{path} {problem}: choose one of {names} with --tensor, or several with a pattern "
            "such as '*'"
        )
    return {name: tensors[name]() for name in chosen}


def _npy(path: Path) -> Tensors:
    return {"": partial(_load, path, mmap_mode="r")}


def _npz(path: Path) -> Tensors:
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: not a .npz file")
    archive = _load(path)
    return {name: partial(_item, path, archive, name) for name in archive.files}


def _load(path: Path, **options: Any) -> Any:
    try:
        return np.load(path, allow_pickle=False, **options)
    except (ValueError, EOFError) as error:  # NumPy advises to unpickle: a study never does
        raise ValueError(f"{path}: {_reason(error)}") from None


def _item(path: Path, archive: Any, name: str) -> NDArray[Any]:
    try:
        values: NDArray[Any] = archive[name]
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: {name}: {_reason(error)}") from None
    return values


def _reason(error: Exception) -> str:
    text = str(error)
    if "pickle" in text.lower() or "object" in text.lower():
        return "holds Python objects or is no NumPy file; only arrays of numbers are read"
    if "mmap length" in text or "EOF" in text:
        return "the file is cut off: it holds less than its header says"
    if "'<f1'" in text:  # ml_dtypes writes it so
        return "float8_e5m2, which NumPy cannot read: save x.view('V1') and name the type (--dtype)"
    return text


def _safetensors(path: Path) -> Tensors:
    """Eight bytes with the header's length, a JSON header, and the tensors' bytes."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT):
            raise ValueError(f"{path}: its header of {length} bytes does not fit into the file")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path}: its header is not a JSON object")
    header.pop("__metadata__", None)
    data = 8 + length
    return {
        name: partial(_mapped, path, name, entry, data, size - data)
        for name, entry in header.items()
    }


def _mapped(path: Path, name: str, entry: Any, data: int, available: int) -> NDArray[Any]:
    """One tensor, mapped. **Raises**: ValueError if its entry does not fit into the file."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, end)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path}: {name}: expected dtype, shape and data_offsets") from None
    if not isinstance(dtype, str) or dtype not in SAFETENSORS:
        raise ValueError(f"{path}: {name} has dtype {dtype!r}; known are {', '.join(SAFETENSORS)}")
    bytes_needed = math.prod(shape) * SAFETENSORS[dtype].itemsize
    if end - begin != bytes_needed or end > available:
        raise ValueError(
            f"{path}: {name} needs {bytes_needed} bytes, has offsets {begin} to {end}, and the "
            f"file holds {available}"
        )
    if not bytes_needed:
        return np.empty(shape, SAFETENSORS[dtype])
    raw = np.memmap(path, np.uint8, "r", offset=data + begin, shape=(bytes_needed,))
    return raw.view(SAFETENSORS[dtype]).reshape(shape)


READERS: dict[str, Callable[[Path], Tensors]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".safetensors": _safetensors,
}
