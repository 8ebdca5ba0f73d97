"""Values of a study as sources give them: any range of elements of any replicas."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpusim.fallback.formats import FLOAT64, kind_of

__all__ = ["GRADIENTS", "Array", "First", "Source"]

#: The name of the digits network's gradients.
GRADIENTS = "gradients"


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
