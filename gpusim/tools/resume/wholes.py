"""Puts a tensor's parts on the ranks together, without knowing the program.

A DTensor says how it is cut, FSDP1 and ZeRO's parts where they begin. Plain tensors are the same on
all ranks, or parts of which the cut is not known: those are compared as they are, or joined in any
dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.tools.equal.traces import Claim, Event

__all__ = ["Whole", "difference", "is_same", "whole_of"]

Array = NDArray[Any]
MOST = 8
"""Distinct parts from which on they are joined in the order of the ranks alone."""


@dataclass(eq=False)
class Whole:
    """A tensor of a program on all its ranks.

    **Attributes**: `array`, the full tensor, None if it is not known how the parts are cut;
    `parts`, those of each rank; `apart`, the first rank whose copy is not that of the others, None
    if all copies agree.
    """

    array: Array | None
    parts: dict[int, Array]
    apart: int | None = None


def is_same(one: Array, other: Array) -> bool:
    """Whether two arrays have the same shape and elements.

    >>> is_same(np.ones(2), np.ones(2)), is_same(np.ones(2), np.ones((1, 2)))
    (True, False)
    """
    return one.shape == other.shape and bool(
        np.array_equal(one, other, equal_nan=one.dtype.kind == "f" and other.dtype.kind == "f")
    )


def whole_of(events: Mapping[int, Sequence[Event]]) -> Whole:
    """The whole of the events that each rank has of one tensor."""
    first = [own[0] for own in events.values()]
    if any(event.slice is not None for own in events.values() for event in own):
        return _of_slices(events)
    parts = {rank: own[0].array for rank, own in events.items()}
    if any(event.claim is not None for event in first):
        claims = {rank: own[0].claim for rank, own in events.items() if own[0].claim is not None}
        joined = _of_claims(parts, claims)
        if joined is not None:
            return joined
    ranks = iter(parts.items())
    _, mine = next(ranks)
    apart = next((rank for rank, part in ranks if not is_same(part, mine)), None)
    return Whole(mine if apart is None else None, parts, apart)


def _of_slices(events: Mapping[int, Sequence[Event]]) -> Whole:
    """Parts of a flattened tensor; with copies, where a part is on several ranks."""
    shape = next(
        event.slice.shape for own in events.values() for event in own if event.slice is not None
    )
    size = int(np.prod(shape, dtype=np.int64))
    flat, known = np.zeros(size), np.zeros(size, bool)
    parts, apart = {}, None
    for rank, own in sorted(events.items()):
        for event in own:
            array = event.array.reshape(-1)
            begin = event.slice.start if event.slice is not None else 0
            end = min(begin + len(array), size)
            there = known[begin:end]
            array = array[: end - begin]
            if apart is None and not is_same(array[there], flat[begin:end][there]):
                apart = rank
            flat[begin:end], known[begin:end] = np.where(there, flat[begin:end], array), True
            parts[rank] = array
    return Whole(flat.reshape(shape) if known.all() else None, parts, apart)


def _of_claims(parts: dict[int, Array], claims: Mapping[int, Claim]) -> Whole | None:
    """The whole of a DTensor's parts, by its placements; None for parts that it cannot be of."""
    claim = next(iter(claims.values()))
    mesh = np.asarray(claim.mesh)
    if mesh.size == 0 or any(each.startswith("P") for each in claim.placements):
        return None
    mesh = mesh.reshape(mesh.shape or (1,))
    held: Any = np.empty(mesh.shape, object)
    for index in np.ndindex(*mesh.shape):
        held[index] = parts.get(int(mesh[index]))
    apart = None
    # Copies first, while parts are still those of ranks. Then the last dimension of the mesh, which
    # has cut last; where FSDP2 has cut parts of tensor parallelism, its shard is strided.
    kinds = claim.placements
    order = sorted(range(mesh.ndim), key=lambda n: (kinds[n] != "R", "/" not in kinds[n], -n))
    numbers = {id(part): rank for rank, part in parts.items()}
    for axis in order:
        placement = claim.placements[axis]
        joined: Any = np.empty(held.shape[:axis] + held.shape[axis + 1 :], object)
        for index in np.ndindex(*joined.shape):
            along = [(*index[:axis], n, *index[axis:]) for n in range(held.shape[axis])]
            each = [held[place] for place in along]
            present = [part for part in each if part is not None]
            if not present:
                return None
            if placement == "R":
                odd = next((part for part in present if not is_same(part, present[0])), None)
                if odd is not None and apart is None:
                    apart = numbers.get(id(odd), -1)
                joined[index] = present[0]
            else:
                dim = int(placement[1:].partition("/")[0])
                try:
                    joined[index] = np.concatenate(present, dim)
                except ValueError:
                    return None
        held = np.expand_dims(joined, axis)
    array = held.reshape(-1)[0]
    return Whole(array, parts, apart) if array.shape == claim.shape else None


def _joined(parts: dict[int, Array]) -> Iterator[Array]:
    """The arrays that plain parts may be of: distinct ones, joined in a dimension."""
    distinct: list[Array] = []
    for part in parts.values():
        if not any(is_same(part, each) for each in distinct):
            distinct.append(part)
    if len(distinct) == 1:
        yield distinct[0]
        return
    if len({each.ndim for each in distinct}) > 1:
        return
    for dim in range(distinct[0].ndim):
        try:
            yield np.concatenate(distinct, dim)
        except ValueError:
            continue


def difference(one: Whole, other: Whole) -> int | None:
    """The first rank of the other that is not the one's tensor; None if it is the same.

    Of parts whose cut is not known, any joint that both have is enough.
    """
    if one.array is not None and other.array is not None:
        if not is_same(one.array, other.array):
            return next(
                (r for r, part in other.parts.items() if not _has(one.array, part)),
                next(iter(other.parts)),
            )
        return other.apart if one.apart is None else None
    if one.parts.keys() == other.parts.keys():
        return next(
            (rank for rank in one.parts if not is_same(one.parts[rank], other.parts[rank])), None
        )
    mine = list(_joined(one.parts)) if one.array is None else [one.array]
    theirs = list(_joined(other.parts)) if other.array is None else [other.array]
    if any(is_same(a, b) for a, b in itertools.product(mine, theirs)):
        return None
    return other.apart if other.apart is not None else next(iter(other.parts))


def _has(array: Array, part: Array) -> bool:
    """Whether a part may be one of the array's: its shape alone says that it is a copy."""
    return part.shape != array.shape or is_same(array, part)
