"""ppermute, pshuffle and pbroadcast: whole values change replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import ReplicaIndexError
from ..libraries import on_device, zeros_like
from ..reduction import ReductionLike
from .distributed import algorithms, rearrange
from .distributed.layout import Layout
from .fold import Fold, fold_all
from .kernels import copy, empty, rows
from .operand import Operand, Result, as_slice, read_only, replica_index
from .record import AxisName, Call, collective, same_shape

# ppermute and pshuffle


def _permute(x: Operand, *, perm: Iterable[Sequence[int]]) -> Result:
    return _send(x, sources_of(perm, x.size))


def _permute_distributed(layout: Layout, x: Operand, *, perm: Iterable[Sequence[int]]) -> Result:
    return rearrange.send(layout, x, sources_of(perm, layout.size))


def _shuffle(x: Operand, *, perm: Iterable[int]) -> Result:
    return _send(x, dict(enumerate(permutation_of(perm, x.size))))


def _shuffle_distributed(layout: Layout, x: Operand, *, perm: Iterable[int]) -> Result:
    return rearrange.send(layout, x, dict(enumerate(permutation_of(perm, layout.size))))


def _send(x: Operand, sources: dict[int, int]) -> Result:
    """Give each destination (key) its source's value, and the others zeros."""
    full = len(sources) == x.size
    if full and x.same:
        return Result(read_only(x[0]), False)
    if x.listed:
        nothing = None if full else read_only(np.zeros_like(x[0], order="C"))
        arrived = (sources.get(replica) for replica in range(x.size))
        return Result([nothing if s is None else read_only(x[s]) for s in arrived], True)
    if full and (evenly := as_slice([sources[r] for r in range(x.size)])) is not None:
        return Result(read_only(x.values[evenly]), True)
    if on_device(x.values):
        chosen = [sources.get(replica) for replica in range(x.size)]
        return Result(rows(x.values, chosen), True)
    out = empty(x.values)
    nothing = np.zeros_like(out, shape=())
    runs = _runs([sources.get(replica) for replica in range(x.size)])
    copy([(out[to], nothing if start is None else x.values[start]) for to, start in runs])
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
    pairs = [_pair(pair) for pair in perm]
    sources: dict[int, int] = {}
    for ends in pairs:
        source, destination = (
            replica_index(number, size, f"ppermute: {end} of {ends!r}", negative=True)
            for number, end in zip(ends, ("source", "destination"), strict=True)
        )
        if destination in sources:
            raise ValueError(f"ppermute: replica {destination} is a destination twice in {pairs}")
        sources[destination] = source
    senders = list(sources.values())
    if len(set(senders)) < len(senders):
        twice = sorted({source for source in senders if senders.count(source) > 1})
        raise ValueError(f"ppermute: replicas {twice} are sources more than once in {pairs}")
    return sources


def _pair(pair: Iterable[int]) -> tuple[int, int]:
    try:
        ends = tuple(pair)
    except TypeError as error:
        raise TypeError(f"{_PAIRS}, got {pair!r}") from error
    if len(ends) != 2:
        raise ValueError(f"{_PAIRS}, got {ends!r}")
    return ends


def _inverse(sources: dict[int, int]) -> dict[int, int]:
    return {source: destination for destination, source in sources.items()}


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


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    try:
        items = tuple(value)
    except TypeError:
        raise TypeError(
            f"{name} must be a sequence or another iterable, but got {value!r}"
        ) from None
    return tuple(tuple(item) if isinstance(item, list) else item for item in items)


@collective(local=_permute, distributed=_permute_distributed, result=same_shape, moves=True)
def ppermute(x: Any, axis_name: AxisName, perm: Iterable[Sequence[int]]) -> Call:
    """Each source sends its value to its destination; a replica that receives nothing holds zeros.

    **Arguments**:

    - `x`: a pytree of arrays.
    - `axis_name`: a mapped axis, or a tuple of them.
    - `perm`: pairs (source, destination) of replica indices; no source and no destination twice.
      Negative ones count from the end of the axis.

    **Returns**: values like `x`. A value that is the same on all replicas comes out as it is if
    every replica is a destination; of stacked arrays a read-only view where a slice can say it.

    **Raises**: ValueError for a source or destination that comes twice, or is out of range (which
    is an IndexError too), TypeError for one that is not an integer.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> x = np.array([1, 2, 3])
    >>> gpusim.vmap(lambda x: lax.ppermute(x, "i", [(0, 1), (1, 2)]), axis_name="i")(x)
    array([0, 1, 2])
    """
    return Call(ppermute, (x,), axis_name, parameters={"perm": _as_tuple("perm", perm)})


def _permute_back(x: Operand, *, perm: Iterable[Sequence[int]]) -> Result:
    return _send(x, _inverse(sources_of(perm, x.size)))


def _permute_back_distributed(
    layout: Layout, x: Operand, *, perm: Iterable[Sequence[int]]
) -> Result:
    return rearrange.send(layout, x, _inverse(sources_of(perm, layout.size)))


@collective(
    name="ppermute.transpose",
    local=_permute_back,
    distributed=_permute_back_distributed,
    result=same_shape,
    moves=True,
)
def _ppermute_transpose(ct: Any, axis_name: AxisName, perm: Iterable[Sequence[int]]) -> Call:
    """Every value goes back to its source; a value that was not sent has no cotangent."""
    parameters = {"perm": _as_tuple("perm", perm)}
    return Call(_ppermute_transpose, (ct,), axis_name, parameters=parameters)


ppermute.transpose, _ppermute_transpose.transpose = _ppermute_transpose, ppermute


@collective(local=_shuffle, distributed=_shuffle_distributed, result=same_shape, moves=True)
def pshuffle(x: Any, axis_name: AxisName, perm: Sequence[int]) -> Call:
    """Replica i gets the value of replica ``perm[i]``; otherwise as a full `ppermute`.

    **Arguments**:

    - `x`: a pytree of arrays.
    - `axis_name`: a mapped axis, or a tuple of them.
    - `perm`: a permutation of 0 to size - 1.

    **Raises**: ValueError where it is not a permutation, TypeError where it does not hold integers.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> x = np.array([1, 2, 3])
    >>> gpusim.vmap(lambda x: lax.pshuffle(x, "i", [2, 0, 1]), axis_name="i")(x)
    array([3, 1, 2])
    """
    return Call(pshuffle, (x,), axis_name, parameters={"perm": _as_tuple("perm", perm)})


def _shuffle_back(x: Operand, *, perm: Iterable[int]) -> Result:
    return _send(x, _inverse(dict(enumerate(permutation_of(perm, x.size)))))


def _shuffle_back_distributed(layout: Layout, x: Operand, *, perm: Iterable[int]) -> Result:
    sources = _inverse(dict(enumerate(permutation_of(perm, layout.size))))
    return rearrange.send(layout, x, sources)


@collective(
    name="pshuffle.transpose",
    local=_shuffle_back,
    distributed=_shuffle_back_distributed,
    result=same_shape,
    moves=True,
)
def _pshuffle_transpose(ct: Any, axis_name: AxisName, perm: Sequence[int]) -> Call:
    """The inverse permutation."""
    parameters = {"perm": _as_tuple("perm", perm)}
    return Call(_pshuffle_transpose, (ct,), axis_name, parameters=parameters)


pshuffle.transpose, _pshuffle_transpose.transpose = _pshuffle_transpose, pshuffle

# pbroadcast


def _broadcast(x: Operand, *, source: int) -> Result:
    return Result(read_only(x[replica_index(source, x.size, "pbroadcast: source")]), False)


def _broadcast_distributed(layout: Layout, x: Operand, *, source: int) -> Result:
    source = replica_index(source, layout.size, "pbroadcast: source")
    return Result(read_only(rearrange.fetch_one(layout, x, source)), False)


@collective(
    local=_broadcast,
    distributed=_broadcast_distributed,
    result=same_shape,
    moves=True,
    replicated=True,
)
def pbroadcast(x: Any, axis_name: AxisName, source: int) -> Call:
    """The value of one replica, on every replica; of stacked arrays a read-only view.

    **Arguments**:

    - `x`: a pytree of arrays.
    - `axis_name`: a mapped axis, or a tuple of them.
    - `source`: the index of the replica whose value it is.

    **Raises**: ValueError for a source out of range (an IndexError too; negative ones included),
    TypeError for one that is not an integer.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> x = np.array([1, 2, 3])
    >>> gpusim.vmap(lambda x: lax.pbroadcast(x, "i", 1), axis_name="i")(x)
    array([2, 2, 2])
    """
    return Call(pbroadcast, (x,), axis_name, parameters={"source": source})


def _sum_at_source(x: Operand, *, source: int, fold: Fold) -> Result:
    source = replica_index(source, x.size, "pbroadcast: source")
    total = fold_all(x, fold)
    if x.listed:
        nothing = read_only(zeros_like(total, total.shape))
        return Result([total if r == source else nothing for r in range(x.size)], True)
    return Result(_only_at(source, total, x.size), True)


def _sum_at_source_distributed(layout: Layout, x: Operand, *, source: int, fold: Fold) -> Result:
    source = replica_index(source, layout.size, "pbroadcast: source")
    total = algorithms.reduce(layout, x, None, fold).value
    here = layout.instance_of[source] == layout.instance
    place = int(layout.position[source]) if here else None
    return Result(_only_at(place, total, len(layout.local)), True)


def _only_at(place: int | None, value: Any, count: int) -> Any:
    """(count, ...): the value at a place, zeros elsewhere."""
    out = zeros_like(value, (count, *value.shape))
    if place is not None:
        copy([(out[place, ...], value)])
    return out


@collective(
    name="pbroadcast.transpose",
    local=_sum_at_source,
    distributed=_sum_at_source_distributed,
    result=same_shape,
    folds=True,
)
def _pbroadcast_transpose(
    ct: Any, axis_name: AxisName, source: int, *, reduction: ReductionLike | None = None
) -> Call:
    """The sum of the cotangents at the source, zeros elsewhere."""
    parameters = {"source": source}
    return Call(_pbroadcast_transpose, (ct,), axis_name, None, reduction, parameters)


pbroadcast.transpose, _pbroadcast_transpose.transpose = _pbroadcast_transpose, pbroadcast
