"""The inputs of a study: distributions, files, arrays in memory, gradients of the digits network.

A source gives any range of elements of any replicas, so that it need not be in memory as a whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpusim.fallback.formats import FLOAT16, FLOAT64, SUB_32_BIT, kind_of
from gpusim.tools.study.settings import ValueFormat
from gpusim.tools.study.synthetic import SYNTHETIC, Synthetic

__all__ = ["GRADIENTS", "Source", "open_sources"]

GRADIENTS = "gradients"
ELEMENTS = 4096
"""The default number of elements of synthetic values."""


class Source(Protocol):
    """Values of shape (replicas, elements)."""

    @property
    def replicas(self) -> int | None:
        """The number of replicas; None: any number."""

    @property
    def elements(self) -> int: ...

    @property
    def scale(self) -> float:
        """The default factor of the values before they are rounded."""

    @property
    def title(self) -> str:
        """A description of the input for the titles of pictures."""

    @property
    def identity(self) -> dict[str, Any]:
        """The parameters that identify these values, for JSON."""

    def block(self, replicas: int, rows: range, first: int, count: int) -> NDArray[Any]:
        """Elements first..first+count-1 of the replicas `rows`, in a run of `replicas`."""


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
        from gpusim.tools.study.gradients import gradients

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


@dataclass(frozen=True)
class Array:
    """An array in memory or mapped from a file; axis 0 numbers the replicas."""

    values: NDArray[Any]
    name: str
    scale: float = 1.0
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kind = _kind(self.values.dtype)
        if kind not in ("float", "int", "bool"):
            raise ValueError(
                f"{self.name}: its dtype is {self.values.dtype}; a study adds real numbers"
            )
        if self.values.ndim == 0 or self.values.size == 0:
            raise ValueError(
                f"{self.name}: its shape is {self.values.shape}; "
                "expected axis 0 to number the replicas, and at least one element"
            )

    @property
    def replicas(self) -> int | None:
        return len(self.values)

    @property
    def elements(self) -> int:
        return self.values.size // len(self.values)

    @property
    def title(self) -> str:
        return f"{self.name}, {self.elements:,} elements"

    @property
    def identity(self) -> dict[str, Any]:
        if self.about:
            return self.about
        digest = hashlib.blake2b(digest_size=16)
        for row in self.values:
            digest.update(np.ascontiguousarray(row, _native(self.values.dtype)).tobytes())
        dtype, shape = self.values.dtype.name, list(self.values.shape)
        return {"kind": "array", "dtype": dtype, "shape": shape, "digest": digest.hexdigest()}

    def block(self, replicas: int, rows: range, first: int, count: int) -> NDArray[Any]:
        part = self.values[rows.start : rows.stop].reshape(len(rows), -1)
        values = part[:, first : first + count]
        wanted = _native(values.dtype) if _kind(values.dtype) == "float" else FLOAT64
        values = values.astype(wanted, copy=False)
        nan = np.isnan(values)
        if nan.any():
            row, column = np.argwhere(nan)[0].tolist()
            raise ValueError(
                f"{self.name}: element {first + column} of replica {rows.start + row} is nan; "
                "a study needs numbers, or infinities"
            )
        return values


@dataclass(frozen=True)
class First:
    """The first elements of another source."""

    source: Source
    elements: int

    @property
    def replicas(self) -> int | None:
        return self.source.replicas

    @property
    def scale(self) -> float:
        return self.source.scale

    @property
    def title(self) -> str:
        return f"{self.source.title}, of them {self.elements:,}"

    @property
    def identity(self) -> dict[str, Any]:
        return {**self.source.identity, "first elements": self.elements}

    def block(self, replicas: int, rows: range, first: int, count: int) -> NDArray[Any]:
        return self.source.block(replicas, rows, first, count)


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in this machine's byte order."""
    return dtype.newbyteorder("=") if dtype.byteorder in "<>" else dtype


def _kind(dtype: np.dtype[Any]) -> str:
    try:
        return kind_of(_native(dtype))
    except TypeError:
        return "other"
