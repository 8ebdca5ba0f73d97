"""The one place that decides which kernels run: those of the library that holds the array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpusim import fallback
from gpusim.fallback import FoldPart, FoldSpec

from .. import libraries
from .operand import Array


class Kernels(Protocol):
    """A set of kernels; their definitions are in `fallback`."""

    def fold(self, members: Any, **keywords: Any) -> Array: ...

    def run_fold(
        self,
        spec: FoldSpec,
        members: Any,
        *,
        batch_ndim: int = ...,
        call: int = ...,
        batch_offset: Any = ...,
        part: FoldPart | None = ...,
        out: Any = ...,
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
        place: Any = ...,
        batch_ndim: int = ...,
    ) -> Array: ...

    def ragged_copy(self, sources: Any, output: Any, segments: NDArray[np.int64]) -> None: ...


def kernels(array: Any) -> Kernels:
    """The kernels for arrays of this one's library."""
    if isinstance(array, np.ndarray):
        return fallback
    if hasattr(type(array), "__cuda_array_interface__"):
        from .. import cuda  # CuPy itself is loaded by the first call

        return cuda
    raise TypeError(f"there are no kernels for arrays of type {type(array).__name__}")


def run_fold(
    spec: FoldSpec,
    members: Any,
    *,
    batch_ndim: int = 0,
    call: int = 0,
    batch_offset: Any = 0,
    part: FoldPart | None = None,
    out: Any = None,
) -> Array:
    """`fallback.run_fold` by the kernels of the members' library."""
    array = members[0] if isinstance(members, list) else members
    fold: Callable[..., Array]
    if not isinstance(array, np.ndarray):
        fold = kernels(array).run_fold
    elif spec.in_phases:
        fold = fallback.run_fold
    else:  # as run_fold picks: a small sum saves the call
        fold = fallback.fold_members
    return fold(
        spec,
        members,
        batch_ndim=batch_ndim,
        call=call,
        batch_offset=batch_offset,
        part=part,
        out=out,
    )


def replace_fields(spec: FoldSpec, **changes: Any) -> FoldSpec:
    """The spec with other fields."""
    return _replaced(spec, tuple(changes.items()))


@lru_cache(1024)  # checking a spec takes longer than a small fold
def _replaced(spec: FoldSpec, changes: tuple[tuple[str, Any], ...]) -> FoldSpec:
    return replace(spec, **dict(changes))


def empty(like: Any, shape: tuple[int, ...] | None = None, dtype: DTypeLike | None = None) -> Array:
    """A new C-contiguous array of this one's library; of its shape and dtype if not given."""
    shape = like.shape if shape is None else shape
    dtype = like.dtype if dtype is None else dtype
    if isinstance(like, np.ndarray):
        return fallback.empty(shape, dtype)
    made: Array = libraries.empty_like(like, shape, dtype)
    return made


def rows(array: Array, chosen: Sequence[int | None]) -> Array:
    """These rows of a GPU's array, zeros for None: as many launches for any number of them."""
    numbers = np.array([0 if row is None else row for row in chosen], np.int64)
    bits = libraries.as_bits(array)
    taken: Array = np.take(bits, libraries.to_library_of(array, numbers), axis=0)
    nothing = [place for place, row in enumerate(chosen) if row is None]
    if nothing:
        taken[libraries.to_library_of(array, np.array(nothing, np.int64))] = 0
    return taken.view(array.dtype)


def convert(array: Any, dtype: DTypeLike) -> Array:
    """array.astype(dtype, copy=False); on a GPU also from and to the 8-bit formats of folds."""
    target = np.dtype(dtype)
    lacking = libraries.lacks_kernels(array.dtype), libraries.lacks_kernels(target)
    if target == array.dtype or not any(lacking) or not libraries.on_device(array):
        converted: Array = array.astype(target, copy=False)
        return converted
    round_to = kernels(array).round_to
    single = round_to(array, np.float32) if lacking[0] else array.astype(np.float32, copy=False)
    return round_to(single, target) if lacking[1] else single.astype(target, copy=False)


def copy(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Copy the second array of each pair into the first; NumPy's by all threads."""
    for target, source in pairs:  # `all` of a generator is a Python call for each array
        if not (isinstance(target, np.ndarray) and isinstance(source, np.ndarray)):
            break
    else:
        fallback.copy(pairs)
        return
    for target, source in pairs:
        libraries.as_bits(target)[...] = libraries.as_bits(source)
