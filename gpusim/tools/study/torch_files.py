"""Tensors of PyTorch as arrays; .pt files are mapped, and read by `weights_only=True` alone."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gpusim.optional import load

__all__ = ["is_tensor", "read_torch", "tensor_array"]

NARROW: dict[str, Any] = {
    name: getattr(ml_dtypes, name)
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
}
"""The types that PyTorch does not hand to NumPy, by their name in both."""
DEPTH = 16
"""The deepest nesting of dicts and lists in a file."""
MOST = 100_000
"""The most tensors of a file: a list may hold one tensor any number of times."""


def is_tensor(given: Any) -> bool:
    """Whether this is a tensor of PyTorch; does not import it."""
    return all(hasattr(given, name) for name in ("detach", "numpy", "element_size", "layout"))


def tensor_array(tensor: Any, name: str) -> NDArray[Any]:
    """The tensor's values, in its own memory where that is possible.

    **Raises**: ValueError for a tensor without values on the CPU, or without a dense layout.
    """
    try:
        dense = tensor.detach().cpu().resolve_conj().resolve_neg()
        dtype = NARROW.get(str(dense.dtype).removeprefix("torch."))
        if dtype is None:
            return np.asarray(dense.numpy())
        torch = load("tensors need", "torch")
        raw = torch.int16 if dense.element_size() == 2 else torch.uint8
        return np.asarray(dense.contiguous().view(raw).numpy()).view(dtype)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise ValueError(f"{name}: expected a dense tensor of real numbers: {reason}") from None


def read_torch(path: Path) -> Any:
    """The tensors of a .pt file as arrays, in the file's own dicts and lists; the rest is left out.

    A file of torch.save's present format is mapped. `weights_only=True` lets it make tensors and
    plain containers, and run nothing.

    **Raises**: ValueError for a file that holds anything else or is broken, OSError for one that
    cannot be read, PackageError without PyTorch.
    """
    torch = load(".pt files need", "torch")
    try:
        found = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except OSError:
        raise
    except Exception as error:  # a broken file makes the reader fail in many ways
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        if "weights" in reason.lower() or "unpickl" in reason.lower():
            reason = "holds more than tensors; only tensors are read (weights_only=True)"
        raise ValueError(f"{path}: {reason}") from None
    budget = iter(range(MOST))
    return _arrays(found, path, "", DEPTH, budget)


def _arrays(given: Any, path: Path, name: str, depth: int, budget: Iterator[int]) -> Any:
    """Arrays for tensors, dicts and lists of them; None for everything else."""
    if is_tensor(given):
        if next(budget, None) is None:
            raise ValueError(f"{path}: expected at most {MOST:,} tensors")
        return tensor_array(given, f"{path} {name}".rstrip())
    if not isinstance(given, (dict, list, tuple)):
        return None
    if not depth:
        raise ValueError(f"{path}: {name[:100]}: expected tensors in at most {DEPTH} levels")
    items = given.items() if isinstance(given, dict) else enumerate(given)
    found = {
        str(key): _arrays(value, path, f"{name}.{key}".lstrip("."), depth - 1, budget)
        for key, value in items
    }
    found = {key: value for key, value in found.items() if value is not None}
    if not found:
        return None
    return found if isinstance(given, dict) else list(found.values())
