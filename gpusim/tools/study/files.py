"""Arrays from users' files: .npy, .safetensors and .pt are mapped, .npz is read.

NumPy's files are never unpickled, and PyTorch's are by `weights_only=True`. The header of a file is
checked before it is used.
"""

from __future__ import annotations

import fnmatch
import json
import math
import zipfile
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gpusim import bounded_arrays
from gpusim.tools.study.torch_files import read_torch

__all__ = ["FILES", "TORCH", "choose", "open_tensors", "read_arrays"]

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
# ml_dtypes writes it as '<f1'.
E5M2 = "float8_e5m2, which NumPy cannot read: save x.view('V1') and name the type (--dtype)"
REASONS = {
    "'<f1'": E5M2,
    "magic string": "is no NumPy file; only arrays of numbers are read",
    ": a header of": "the file is cut off: it holds less than its header says",
}
"""The meaning of a reader's error to a user, by a part of it."""
HEADER_LIMIT = 100_000_000  # bytes; the format's own


def read_arrays(
    path: Path, tensor: str | None = None, *, every: bool = False
) -> dict[str, NDArray[Any]]:
    """The arrays of a file that `tensor` names, by name; that of a .npy file is "".

    **Arguments**:

    - `path`: a .npy, .npz, .safetensors or .pt file.
    - `tensor`: a name, or a pattern as of file names: "*" is all arrays. None: the only array.
    - `every`: None is all arrays.

    **Raises**: OSError if the file cannot be read, ValueError if it holds no such array of numbers.
    """
    tensors = open_tensors(path)
    return {name: tensors[name]() for name in choose(tensors, tensor, str(path), every=every)}


def open_tensors(path: Path) -> Tensors:
    """Return a reader of each array of a file, by its name. **Raises**: as `read_arrays`."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: expected a file named {', '.join(f'*{s}' for s in READERS)}")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    return reader(path)


def choose(
    names: Collection[str], tensor: str | None, where: str, *, every: bool = False
) -> list[str]:
    """The names that a name or pattern means, of those `where` says; None: the only one, or all."""
    if tensor is None:
        chosen = list(names) if len(names) == 1 or every else []
    else:
        alike = [name for name in names if fnmatch.fnmatchcase(name, tensor)]
        chosen = [tensor] if tensor in names else alike
    if not chosen and list(names) == [""]:
        raise ValueError(f"{where} holds one array without a name: {tensor!r} given with --tensor")
    if not chosen:
        problem = f"has no array {tensor!r}" if tensor else f"holds {len(names)} arrays"
        listed = ", ".join(list(names)[:20]) + (", ..." if len(names) > 20 else "")
        raise ValueError(
            f"{where} {problem}: choose one of {listed} with --tensor, several with a pattern "
            "such as '*', or all as one value with --concatenate"
        )
    return chosen


def _npy(path: Path) -> Tensors:
    return {"": partial(_read, path, partial(bounded_arrays.map_npy, path))}


def _npz(path: Path) -> Tensors:
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: not a .npz file")
    archive = bounded_arrays.Archive(path)
    return {name: partial(_read, path, partial(archive.__getitem__, name)) for name in archive}


def _read(path: Path, read: Callable[[], NDArray[Any]]) -> NDArray[Any]:
    try:
        return read()
    except ValueError as error:
        text = str(error)
        for part, said in REASONS.items():
            text = f"{path}: {said}" if part in text else text
        raise ValueError(text) from None


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
    except (ValueError, RecursionError) as error:
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
        raise ValueError(f"{path}: {name:.1000}: expected dtype, shape and data_offsets") from None
    if not isinstance(dtype, str) or dtype not in SAFETENSORS:
        raise ValueError(
            f"{path}: {name:.1000} has dtype {dtype!r:.100}; known are {', '.join(SAFETENSORS)}"
        )
    bytes_needed = math.prod(shape) * SAFETENSORS[dtype].itemsize
    if end - begin != bytes_needed or end > available:
        raise ValueError(
            f"{path}: {name:.1000} needs {bytes_needed} bytes, has offsets {begin} to "
            f"{end}, and the file holds {available}"
        )
    if not bytes_needed:
        return np.empty(shape, SAFETENSORS[dtype])
    raw = np.memmap(path, np.uint8, "r", offset=data + begin, shape=(bytes_needed,))
    return raw.view(SAFETENSORS[dtype]).reshape(shape)


def _torch(path: Path) -> Tensors:
    """The tensors of nested dicts and lists, with the names of all levels between dots."""
    return {name: partial(_same, values) for name, values in _flat(read_torch(path), "")}


def _same(values: NDArray[Any]) -> NDArray[Any]:
    return values


def _flat(given: Any, name: str) -> Iterator[tuple[str, NDArray[Any]]]:
    if isinstance(given, np.ndarray):
        yield name, given
        return
    items = given.items() if isinstance(given, dict) else enumerate(given or ())
    for key, value in items:
        yield from _flat(value, f"{name}.{key}" if name else str(key))


TORCH = (".pt", ".pth")
READERS: dict[str, Callable[[Path], Tensors]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".safetensors": _safetensors,
    **dict.fromkeys(TORCH, _torch),
}
FILES = tuple(READERS)
"""The endings of files that are read."""
