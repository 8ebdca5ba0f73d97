"""ppermute, pshuffle and pbroadcast: whole values change replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import ReplicaIndexError
from ..libraries import on_device
from ..reduction import Reduction
from .kernels import copy, empty, rows
from .linear import linear
from .operand import Operand, Result, Values, as_slice, read_only, replica_index
from .sums import psum


@linear
def ppermute(x: Values, perm: Iterable[Sequence[int]], *, batch_ndim: int = 0) -> Result:
    """Each pair (source, destination) sends the source's value to the destination.

    **Arguments**: ``x`` stacked (R, *batch, *s), or a list of R arrays. No replica is twice a
    source or twice a destination; negative numbers count from the end of the axis.

    **Returns** values like ``x``, zeros where nothing arrives, mapped. A value that is the same
    on all replicas comes out as it is, not mapped, if every replica is a destination. Stacked
    values are a read-only view where a slice can say it; of a list, the arrays themselves.

    **Raises** `ReplicaIndexError` (a ValueError and an IndexError) for a number out of range,
    ValueError for duplicates and for what is no pair, TypeError for what is no integer.

    >>> ppermute(np.array([1.0, 2.0, 3.0]), [(0, 1), (1, 2)])
    Result(value=array([0., 1., 2.]), mapped=True)
    """
    operand = Operand(x, batch_ndim, "ppermute")
    return _send(operand, sources_of(perm, operand.size))


def _ppermute_transpose(
    ct: Values, perm: Iterable[Sequence[int]], *, batch_ndim: int = 0
) -> Result:
    """Every value goes back to where it came from; what was not sent has no cotangent."""
    operand = Operand(ct, batch_ndim, "ppermute")
    sources = sources_of(perm, operand.size)
    return _send(operand, {source: destination for destination, source in sources.items()})


ppermute.transpose = _ppermute_transpose


@linear
def pshuffle(x: Values, perm: Iterable[int], *, batch_ndim: int = 0) -> Result:
    """Replica i receives the value of replica perm[i]; otherwise as a full `ppermute`.

    **Raises** ValueError where ``perm`` is not a permutation of 0..R-1, TypeError where it does
    not hold integers.

    >>> pshuffle(np.array([10, 20, 30]), [2, 0, 1])
    Result(value=array([30, 10, 20]), mapped=True)
    """
    operand = Operand(x, batch_ndim, "pshuffle")
    return _send(operand, dict(enumerate(permutation_of(perm, operand.size))))


def _pshuffle_transpose(ct: Values, perm: Iterable[int], *, batch_ndim: int = 0) -> Result:
    """The inverse permutation."""
    operand = Operand(ct, batch_ndim, "pshuffle")
    inverse = {source: i for i, source in enumerate(permutation_of(perm, operand.size))}
    return _send(operand, inverse)


pshuffle.transpose = _pshuffle_transpose


@linear
def pbroadcast(x: Values, source: int, *, batch_ndim: int = 0) -> Result:
    """The value of replica ``source`` on every replica: a read-only view of it, not mapped.

    **Raises** `ReplicaIndexError` for a source that is not one of 0..R-1 (negative numbers
    included: they equal no replica's index), TypeError for one that is no integer.

    >>> pbroadcast(np.array([10, 20, 30]), 1)
    Result(value=array(20), mapped=False)
    """
    operand = Operand(x, batch_ndim, "pbroadcast")
    source = replica_index(source, operand.size, "pbroadcast: source")
    return Result(read_only(operand[source]), False)


def _pbroadcast_transpose(
    ct: Values,
    source: int,
    *,
    reduction: Reduction | None = None,
    batch_ndim: int = 0,
    call: int | None = None,
    places: Any = None,
) -> Result:
    """The sum of the cotangents at the source, zeros elsewhere."""
    operand = Operand(ct, batch_ndim, "pbroadcast")
    source = replica_index(source, operand.size, "pbroadcast: source")
    total = psum(ct, reduction=reduction, batch_ndim=batch_ndim, call=call, places=places).value
    zeros = np.zeros_like(total, order="C")
    if operand.listed:
        nothing = read_only(zeros)
        return Result([total if r == source else nothing for r in range(operand.size)], True)
    out = np.zeros_like(total, shape=(operand.size, *total.shape), order="C")
    out[source] = total
    return Result(out, True)


pbroadcast.transpose = _pbroadcast_transpose


def _send(operand: Operand, sources: dict[int, int]) -> Result:
    """Give each destination (key) its source's value, and the others zeros."""
    full = len(sources) == operand.size
    if full and operand.same:
        return Result(read_only(operand[0]), False)
    if operand.listed:
        nothing = None if full else read_only(np.zeros_like(operand[0], order="C"))
        arrived = (sources.get(replica) for replica in range(operand.size))
        return Result([nothing if s is None else read_only(operand[s]) for s in arrived], True)
    if full and (evenly := as_slice([sources[r] for r in range(operand.size)])) is not None:
        return Result(read_only(operand.values[evenly]), True)
    if on_device(operand.values):
        chosen = [sources.get(replica) for replica in range(operand.size)]
        return Result(rows(operand.values, chosen), True)
    out = empty(operand.values)
    nothing = np.zeros_like(out, shape=())
    runs = _runs([sources.get(replica) for replica in range(operand.size)])
    copy([(out[to], nothing if start is None else operand.values[start]) for to, start in runs])
    return Result(out, True)


def _runs(sources: list[int | None]) -> Iterator[tuple[slice, slice | None]]:
    """Neighbours that receive from neighbours, or nothing: as one, for long copies are faster."""
    first = 0
    for replica in range(1, len(sources) + 1):
        start, length = sources[first], replica - first
        goes_on = None if start is None else start + length
        if replica == len(sources) or sources[replica] != goes_on:
            yield slice(first, replica), None if start is None else slice(start, goes_on)
            first = replica


_PAIRS = "ppermute: perm must hold pairs (source, destination)"


def sources_of(perm: Iterable[Sequence[int]], size: int) -> dict[int, int]:
    """The source of each destination, from pairs that are checked."""
    sources: dict[int, int] = {}
    for pair in perm:
        try:
            ends = tuple(pair)
        except TypeError as error:
            raise TypeError(f"{_PAIRS}, got {pair!r}") from error
        if len(ends) != 2:
            raise ValueError(f"{_PAIRS}, got {ends!r}")
        source, destination = (
            replica_index(number, size, f"ppermute: {end} of {ends!r}", negative=True)
            for number, end in zip(ends, ("source", "destination"), strict=True)
        )
        if destination in sources:
            raise ValueError(f"ppermute: replica {destination} is a destination twice in {perm!r}")
        sources[destination] = source
    senders = list(sources.values())
    if len(set(senders)) < len(senders):
        twice = sorted({source for source in senders if senders.count(source) > 1})
        raise ValueError(f"ppermute: replicas {twice} are sources more than once in {perm!r}")
    return sources


def permutation_of(perm: Iterable[int], size: int) -> list[int]:
    given = list(perm)
    try:
        sources = [replica_index(source, size, "pshuffle: perm's entries") for source in given]
    except ReplicaIndexError as error:
        raise ReplicaIndexError(f"{error} in {given}") from None
    if sorted(sources) != list(range(size)):
        raise ValueError(
            f"pshuffle: perm must be a permutation of the replicas 0..{size - 1}, got {given}"
        )
    return sources
