"""The inputs of a study: distributions, files, arrays, gradients of the digits network."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.fallback.formats import FLOAT16, SUB_32_BIT
from gpusim.tools.study.arrays import GRADIENTS, Array, First, Source
from gpusim.tools.study.files import FILES, TORCH, choose, open_tensors
from gpusim.tools.study.frames import frame_array, is_frame
from gpusim.tools.study.gradients import gradients
from gpusim.tools.study.settings import ValueFormat
from gpusim.tools.study.synthetic import SYNTHETIC, Synthetic
from gpusim.tools.study.torch_files import is_tensor, read_torch, tensor_array
from gpusim.tools.study.workers import RESAMPLE, Joined, Resampled, Workers, workers_of

__all__ = ["Input", "open_sources", "varies"]

ELEMENTS = 4096
"""The default number of elements of synthetic values."""

MOST = 2**34
"""The most elements of a distribution: more would be measured for months."""

Input = (
    str
    | PathLike[str]
    | NDArray[Any]
    | Source
    | Mapping[str, Any]
    | list[Any]
    | tuple[Any, ...]
    | Any  # tensors and DataFrames, which are known by what they can do
)
"""The inputs that `sweep` takes."""

Sources = dict[str | None, Source]


def varies(given: Input, resample: str | None) -> bool:
    """Whether the input has other values for another seed."""
    return resample is not None or (isinstance(given, str) and given in (GRADIENTS, *SYNTHETIC))


def open_sources(
    given: Input,
    *,
    elements: int | None = None,
    seed: int = 0,
    epoch: int = 5,
    tensor: str | None = None,
    dtypes: Iterable[ValueFormat] = (),
    concatenate: bool = False,
    resample: str | None = None,
) -> Sources:
    """The sources that `given` names: a distribution, "gradients", or arrays of any kind.

    **Arguments**:

    - `given`: as `input` of `sweep`.
    - `elements`: limits the number of elements, of each array.
    - `seed`: draws synthetic values, the first weights of the digits network, and workers.
    - `epoch`: the epoch after which the network's gradients are taken.
    - `tensor`: the name of an array, or a pattern for several.
    - `dtypes`: among them the type of values that are stored as raw bytes.
    - `concatenate`: several arrays are one value, one after the other.
    - `resample`: draw the recorded workers again, by "workers" or "elements".

    **Returns**: the sources, by the arrays' names; a single one has None.

    **Raises**: ValueError or OSError for an input that cannot be read.
    """
    if elements is not None and not 1 <= elements <= MOST:
        raise ValueError(f"elements={elements!r}: expected at least 1, and at most {MOST:,}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"input_seed={seed!r}: expected an integer from 0 to 2**64 - 1")
    if resample is not None and resample not in RESAMPLE:
        raise ValueError(f"resample={resample!r}: expected one of {', '.join(RESAMPLE)}")
    name = given if isinstance(given, str) and given in (GRADIENTS, *SYNTHETIC) else None
    many = name is None and (isinstance(given, (str, PathLike)) or _nested(given))
    if not many and (tensor is not None or concatenate):
        option = f"tensor={tensor!r}" if tensor is not None else "concatenate=True"
        raise ValueError(f"{option}: expected a file as input, or a dict, which has arrays by name")
    if name in SYNTHETIC:
        if resample is not None:
            raise ValueError(
                f"resample={resample!r}: expected recorded workers; {name} has any number of "
                "replicas"
            )
        return {None: Synthetic(name, ELEMENTS if elements is None else elements, seed)}
    if name == GRADIENTS:
        found: Sources = {None: gradients(epoch, 0 if resample else seed)}
    else:
        found = _read(given, tensor, list(dtypes), concatenate)
    several = len(found) > 1
    limited = {
        key: _first(source, min(elements, source.elements) if several and elements else elements)
        for key, source in found.items()
    }
    if resample is None:
        return limited
    return {key: Resampled(source, resample, seed) for key, source in limited.items()}


def _read(
    given: Input, tensor: str | None, dtypes: list[ValueFormat], concatenate: bool
) -> Sources:
    """The sources of a path, or of what holds numbers."""
    if not isinstance(given, (str, PathLike)):
        return _of_object(given, "input", tensor, dtypes, concatenate)
    if not fspath(given):
        raise ValueError("input='': expected the name of a distribution or a file, or a pattern")
    path = Path(given)
    if not path.exists() and glob.has_magic(str(path)):
        return _of_workers(path, tensor, dtypes, concatenate)
    if not path.suffix and not path.exists():
        known = ", ".join((GRADIENTS, *SYNTHETIC))
        raise ValueError(f"input={str(path)!r}: expected one of {known}, a file, or a pattern")
    if path.suffix.lower() in TORCH and path.is_file():
        tensors = read_torch(path)
        if isinstance(tensors, list):  # an item from each worker, as a list in Python
            return _of_object(tensors, path.name, tensor, dtypes, concatenate)
    opened = open_tensors(path)
    chosen = choose(opened, tensor, str(path), every=concatenate)
    titles = {name: f"{path.name} {name}".rstrip() for name in chosen}
    arrays: Sources = {
        name: Array(_typed(opened[name](), titles[name], dtypes), titles[name]) for name in chosen
    }
    return _joined(arrays, path.name, concatenate)


def _joined(sources: Sources, name: str, concatenate: bool) -> Sources:
    """Several by name, one without; all as one value if `concatenate`."""
    if concatenate and len(sources) > 1:
        return {None: Joined(tuple(sources.values()), name)}
    return {None: next(iter(sources.values()))} if len(sources) == 1 else sources


def natural(path: str) -> list[Any]:
    """The key that sorts rank2 before rank10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]


def _of_workers(
    pattern: Path, tensor: str | None, dtypes: list[ValueFormat], concatenate: bool
) -> Sources:
    """A file from each worker, in the order of the numbers in their names."""
    paths = [Path(each) for each in sorted(glob.glob(str(pattern), recursive=True), key=natural)]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise FileNotFoundError(f"{pattern}: there is no such file, of {', '.join(FILES)}")
    first = open_tensors(paths[0])
    names = choose(first, tensor, str(paths[0]), every=concatenate)
    arrays: dict[str, list[tuple[str, NDArray[Any]]]] = {name: [] for name in names}
    for number, path in enumerate(paths):
        opened = open_tensors(path) if number else first
        for name in names:
            if name not in opened:
                raise ValueError(f"{path} has no array {name!r}, which {paths[0]} has")
            title = f"{path.name} {name}".rstrip()
            arrays[name].append((title, _typed(opened[name](), title, dtypes)))
    sources: Sources = {
        name: workers_of(found, f"{pattern.name} {name}".rstrip()) for name, found in arrays.items()
    }
    return _joined(sources, pattern.name, concatenate)


def _nested(given: Any) -> bool:
    """Whether this has arrays by name: a dict, or one from each worker."""
    if isinstance(given, (list, tuple)):
        return bool(given) and all(isinstance(each, Mapping) for each in given)
    return isinstance(given, Mapping)


def _of_object(
    given: Any, name: str, tensor: str | None, dtypes: list[ValueFormat], concatenate: bool
) -> Sources:
    """The sources of numbers in memory."""
    if hasattr(given, "block") and hasattr(given, "identity"):
        return {None: given}
    if isinstance(given, Mapping):
        names = choose([str(key) for key in given], tensor or "*", name)
        by_name = {str(key): value for key, value in given.items()}
        sources: Sources = {key: _values(by_name[key], f"{name} {key}", dtypes) for key in names}
        return _joined(sources, name, concatenate)
    if not _nested(given):
        return {None: _values(given, "array" if name == "input" else name, dtypes)}
    first = [str(key) for key in given[0]]
    for number, each in enumerate(given):
        if sorted(map(str, each)) != sorted(first):
            raise ValueError(f"{name}: item {number} has other names than the first one")
    chosen = choose(first, tensor or "*", name)
    found: Sources = {}
    for key in chosen:
        items = [{str(k): v for k, v in each.items()}[key] for each in given]
        found[key] = _list(items, f"{name} {key}", dtypes)
    return _joined(found, name, concatenate)


def _values(given: Any, name: str, dtypes: list[ValueFormat]) -> Source:
    """An array whose axis 0 numbers the replicas, or a list with an array from each."""
    if isinstance(given, (list, tuple)):
        return _list(given, name, dtypes)
    return Array(_array(given, name, dtypes), name)


def _list(given: list[Any] | tuple[Any, ...], name: str, dtypes: list[ValueFormat]) -> Workers:
    if not given:
        raise ValueError(f"{name}: an empty list; expected an array from each worker")
    titles = [f"{name}, item {number}" for number in range(len(given))]
    arrays = [_array(each, title, dtypes) for each, title in zip(given, titles, strict=True)]
    return workers_of(list(zip(titles, arrays, strict=True)), name)


def _array(given: Any, name: str, dtypes: list[ValueFormat]) -> NDArray[Any]:
    """NumPy's array of anything that holds numbers; errors do not print it."""
    if is_tensor(given):
        return tensor_array(given, name)
    if is_frame(given):
        return frame_array(given, name)
    if isinstance(given, np.ndarray) or hasattr(given, "__array__"):
        return _typed(np.asarray(given), name, dtypes)
    if isinstance(given, (list, tuple, int, float)):
        try:
            return np.asarray(given)
        except (ValueError, TypeError):
            raise ValueError(f"{name}: a list of unequal lengths; expected numbers") from None
    raise ValueError(
        f"{name}: a {type(given).__name__} given; expected a name, a file, an array, a list of "
        "arrays, a dict of them, or a DataFrame"
    )


def _typed(values: NDArray[Any], name: str, dtypes: Iterable[ValueFormat]) -> NDArray[Any]:
    """Values of 1 or 2 raw bytes, as NumPy stores types that it lacks, in the one of `dtypes`."""
    raw = values.dtype
    if raw.type is not np.void or raw.names is not None or raw.itemsize > 2:
        return values
    known = [dtype for dtype in SUB_32_BIT if dtype != FLOAT16 and dtype.itemsize == raw.itemsize]
    named = dict.fromkeys(each for each in dtypes if isinstance(each, np.dtype) and each in known)
    if len(named) != 1:
        raise ValueError(
            f"{name}: its values are raw bytes, {raw.itemsize} each: expected their type as "
            f"dtype (--dtype), one of {', '.join(dtype.name for dtype in known)}"
        )
    return values.view(next(iter(named)))


def _first(source: Source, elements: int | None) -> Source:
    if elements is None or elements == source.elements:
        return source
    if elements > source.elements:
        raise ValueError(f"elements={elements}: the input has {source.elements} for each replica")
    return First(source, elements)
