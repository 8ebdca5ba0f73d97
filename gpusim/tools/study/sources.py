"""The inputs of a study: distributions, files, arrays, gradients of the digits network."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.fallback.formats import FLOAT16, SUB_32_BIT
from gpusim.tools.study.arrays import GRADIENTS, Array, First, Source
from gpusim.tools.study.gradients import gradients
from gpusim.tools.study.settings import ValueFormat
from gpusim.tools.study.synthetic import SYNTHETIC, Synthetic

__all__ = ["open_sources"]

ELEMENTS = 4096
"""The default number of elements of synthetic values."""


def open_sources(
    given: str | PathLike[str] | NDArray[Any] | Source,
    *,
    elements: int | None = None,
    seed: int = 0,
    epoch: int = 5,
    tensor: str | None = None,
    dtypes: Iterable[ValueFormat] = (),
) -> dict[str | None, Source]:
    """The sources that `given` names: a distribution, "gradients", arrays of a file, or an array.

    **Arguments**:

    - `given`: as `input` of `sweep`.
    - `elements`: limits the number of elements, of each array.
    - `seed`: draws synthetic values, and the first weights of the digits network.
    - `epoch`: the epoch after which the network's gradients are taken.
    - `tensor`: the name of a file's array, or a pattern for several.
    - `dtypes`: among them the type of values that are stored as raw bytes.

    **Returns**: the sources, by the arrays' names; a single one has None.

    **Raises**: ValueError or OSError for an input that cannot be read.
    """
    if elements is not None and elements < 1:
        raise ValueError(f"elements={elements!r}: expected at least 1")
    if not 0 <= seed < 2**64:
        raise ValueError(f"input_seed={seed!r}: expected an integer from 0 to 2**64 - 1")
    name = isinstance(given, str) and given in (GRADIENTS, *SYNTHETIC)
    if tensor is not None and (name or not isinstance(given, (str, PathLike))):
        raise ValueError(f"tensor={tensor!r}: expected a file as input, which has arrays by name")
    if isinstance(given, str) and given in SYNTHETIC:
        return {None: Synthetic(given, ELEMENTS if elements is None else elements, seed)}
    if isinstance(given, str) and given == GRADIENTS:
        source: Source = gradients(epoch, seed)
    elif isinstance(given, (str, PathLike)):
        found = _of_file(Path(given), tensor, dtypes)
        if len(found) > 1:
            return {
                name: _first(source, elements and min(elements, source.elements))
                for name, source in found.items()
            }
        (source,) = found.values()
    elif isinstance(given, np.ndarray):
        source = Array(_typed(given, "array", dtypes), "array")
    elif hasattr(given, "block"):
        source = given
    else:
        raise ValueError(f"input={given!r}: expected a name, a file or an array")
    return {None: _first(source, elements)}


def _of_file(
    path: Path, tensor: str | None, dtypes: Iterable[ValueFormat]
) -> dict[str | None, Source]:
    from gpusim.tools.study.files import read_arrays

    known = ", ".join((GRADIENTS, *SYNTHETIC))
    if not path.suffix and not path.exists():
        raise ValueError(f"input={str(path)!r}: expected one of {known}, or a file")
    found: dict[str | None, Source] = {}
    for name, array in read_arrays(path, tensor).items():
        title = f"{path.name} {name}".rstrip()
        found[name] = Array(_typed(array, title, dtypes), title)
    return found


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
