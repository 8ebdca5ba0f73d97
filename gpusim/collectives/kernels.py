"""The one place that decides which kernels run: those of the library that holds the array."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import fallback

from .operand import Array


class Kernels(Protocol):
    """What a set of kernels offers; `fallback` says what each of them does."""

    def fold(
        self,
        members: Any,
        *,
        op: str = ...,
        order: str = ...,
        accumulate: Any = ...,
        out_dtype: Any = ...,
        divisor: int | None = ...,
        batch_ndim: int = ...,
        cut_axis: int | None = ...,
        rounding: str = ...,
        seed: int = ...,
        call: int = ...,
        places: Any = ...,
    ) -> Array: ...

    def round_to(
        self,
        x: Any,
        dtype: Any,
        *,
        rounding: str = ...,
        seed: int = ...,
        step: int = ...,
        call: int = ...,
        place: int = ...,
        batch_ndim: int = ...,
    ) -> Array: ...

    def ragged_copy(self, sources: Any, output: Any, segments: NDArray[np.int64]) -> None: ...


def kernels(array: Array) -> Kernels:
    """The kernels for arrays of this one's library."""
    if isinstance(array, np.ndarray):
        return fallback
    raise TypeError(f"there are no kernels for arrays of type {type(array).__name__}")
