"""Small leaves of a call are folded as one value: a fold of few elements takes as long as its call.

Their bits stay the same, as each element's result depends on its members alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from math import prod

import numpy as np

from gpusim.fallback.orders import COMPENSATED, EXACT

from ..reduction import Reduction
from .fold import fold_spec
from .operand import Array

__all__ = ["SMALL", "join", "joins", "small_together", "split"]

SMALL = 32 * 2**10
"""Bytes of all members of a leaf, up to which a copy takes less time than a call."""

ORDERS = frozenset(["linear", "reverse", "tree", *COMPENSATED, EXACT])
"""Orders that are the same for all elements of a value."""


@lru_cache(256)
def joins(reduction: Reduction) -> bool:
    """Whether leaves may be joined: the result for an element depends on the members' elements
    there, and not on where that is."""
    spec = fold_spec(reduction)
    return reduction.order in ORDERS and not (spec.in_phases or spec.stochastic)


def small_together(arrays: Iterable[tuple[Array, Hashable]]) -> list[list[int]]:
    """The places of arrays in groups that can be joined; all others are alone.

    Arrays of one group have the same kind, which comes with each, and dtype.
    """
    groups: list[list[int]] = []
    small: dict[Hashable, list[int]] = {}
    for place, (array, kind) in enumerate(arrays):
        if type(array) is np.ndarray and array.nbytes <= SMALL:
            found = small.setdefault((array.dtype, kind), [])
            found.append(place)
            if len(found) > 1:
                continue
            groups.append(found)
        else:
            groups.append([place])
    return groups


def join(arrays: Sequence[Array], leading: int) -> Array:
    """The arrays as one of shape (*leading, elements); `leading` axes are the same in all."""
    flat = [x.reshape((*x.shape[:leading], prod(x.shape[leading:]))) for x in arrays]
    joined: Array = np.concatenate(flat, axis=leading)
    return joined


def split(joined: Array, shapes: Iterable[tuple[int, ...]]) -> list[Array]:
    """The parts of (*leading, elements) as contiguous arrays (*leading, *shape)."""
    parts, first, leading = [], 0, joined.shape[:-1]
    for shape in shapes:
        last = first + prod(shape)
        part = joined[..., first:last].reshape((*leading, *shape))
        parts.append(np.ascontiguousarray(part) if leading else part)
        first = last
    return parts
