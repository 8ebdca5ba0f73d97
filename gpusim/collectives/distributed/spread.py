"""How the members of one collective's group lie over the instances of a world, and what moves
between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...runtime.engines import Buffer, Engine, Pending
from ...runtime.world import World
from ..kernels import copy, empty
from ..operand import Array, as_slice

Numbers = NDArray[np.intp]

#: Parts of so many bytes are sent as they lie, without being packed together.
LONG_MESSAGE = 16 * 1024


class _Places(NamedTuple):
    """Which instance holds each member; see `Spread`."""

    held: tuple[Numbers, ...]
    owner: Numbers
    position: Numbers


@lru_cache(64)  # programs make the same calls again and again
def _places_of(shape: tuple[int, ...], axis: int, counts: tuple[int, ...]) -> _Places:
    numbers = np.arange(math.prod(shape)).reshape(shape)
    edges = np.cumsum(counts)[:-1]
    held = tuple(part.ravel() for part in np.split(numbers, edges, axis=axis))
    owner, position = np.empty(numbers.size, np.intp), np.empty(numbers.size, np.intp)
    for instance, members in enumerate(held):
        owner[members] = instance
        position[members] = np.arange(len(members))
    for array in (*held, owner, position):
        array.flags.writeable = False
    return _Places(held, owner, position)


@dataclass(frozen=True)
class Spread:
    """The members of a group over several axes, of which the world shares one out.

    Members are numbered row-major in the axes' order; an instance holds those with its indices of
    the shared axis, in ascending order.

    Attributes:
        world: the world.
        shape: the size of each axis, on all instances.
        axis: which of them is shared out.
        counts: how many indices of that axis each instance holds.
        tag: the channel on which the instances exchange.
    """

    world: World
    shape: tuple[int, ...]
    axis: int
    counts: tuple[int, ...]
    tag: int

    @property
    def engine(self) -> Engine:
        engine = self.world.engine
        assert engine is not None  # a single instance shares nothing out
        return engine

    @property
    def own(self) -> int:
        """This instance."""
        return self.world.instance

    @property
    def others(self) -> list[int]:
        return [instance for instance in range(self.world.instances) if instance != self.own]

    @property
    def size(self) -> int:
        """The number of members, on all instances."""
        return math.prod(self.shape)

    @property
    def held(self) -> tuple[Numbers, ...]:
        """The members of each instance."""
        return self._places.held

    @property
    def owner(self) -> Numbers:
        """The instance of each member."""
        return self._places.owner

    @property
    def position(self) -> Numbers:
        """Where each member stands among those of its instance."""
        return self._places.position

    @cached_property
    def _places(self) -> _Places:
        return _places_of(self.shape, self.axis, self.counts)

    @property
    def mine(self) -> Numbers:
        return self.held[self.own]

    @contextmanager
    def channel(self) -> Iterator[None]:
        """Its tag is this thread's alone meanwhile."""
        with self.world.channel(self.tag):
            yield

    def exchange(
        self, sends: Sequence[Buffer], receives: Sequence[Buffer], *, results: bool = False
    ) -> Pending:
        """Begin to send and receive; buffers without elements are neither.

        `results` are a flow of their own: they do not wait in a line with what is to be folded.
        """
        return self.world.exchange(
            [(buffer, to) for buffer, to in sends if buffer.size],
            [(buffer, source) for buffer, source in receives if buffer.size],
            self.tag,
            results=results,
        )


def all_gather_bytes(spread: Spread, own: bytes) -> list[bytes]:
    """What each instance has to say, of any length."""
    lengths = np.zeros((spread.world.instances, 1), np.int64)
    lengths[spread.own] = len(own)
    spread.exchange(
        [(lengths[spread.own].copy(), i) for i in spread.others],
        [(lengths[i], i) for i in spread.others],
    ).wait()
    said = [np.zeros(length, np.uint8) for length in lengths[:, 0].tolist()]
    said[spread.own][:] = np.frombuffer(own, np.uint8)
    spread.exchange(
        [(said[spread.own], i) for i in spread.others], [(said[i], i) for i in spread.others]
    ).wait()
    return [text.tobytes() for text in said]


def fetch(
    spread: Spread, rows: Mapping[int, Array], needs: Sequence[Numbers], like: Array
) -> Array:
    """The values of members that may be anywhere.

    Args:
        rows: the values of this instance's members, by number; all of one shape.
        needs: for each instance the members that it asks for, ascending.
        like: any array of their library, shape and dtype.

    Returns:
        A new array (needed, *shape) in the order of ``needs``.
    """
    needed = needs[spread.own]
    out = empty(like, (len(needed), *like.shape))
    sends: list[Buffer] = []
    for other in spread.others:
        wanted = needs[other][spread.owner[needs[other]] == spread.own]
        sends.append((packed([rows[number] for number in wanted.tolist()], like), other))
    receives: list[Buffer] = []
    scattered: list[tuple[Array, Array]] = []
    for other in spread.others:
        places = np.flatnonzero(spread.owner[needed] == other)
        run = as_slice(places.tolist()) if len(places) else slice(0, 0)
        if run is not None and (run.step or 1) == 1:
            receives.append((out[run], other))
            continue
        buffer = empty(like, (len(places), *like.shape))
        receives.append((buffer, other))
        scattered += [(out[p, ...], buffer[row, ...]) for row, p in enumerate(places.tolist())]
    pending = spread.exchange(sends, receives)
    here = np.flatnonzero(spread.owner[needed] == spread.own).tolist()
    copy([(out[place, ...], rows[int(needed[place])]) for place in here])
    pending.wait()
    copy(scattered)
    return out


def contiguous(part: Array) -> Array:
    """The part itself where it is C-contiguous, else a copy."""
    return part if part.flags.c_contiguous else part.copy()


def packed(arrays: Sequence[Array], like: Array) -> Array:
    """Arrays of one shape, one behind the other; a single contiguous one as it is."""
    if len(arrays) == 1 and arrays[0].flags.c_contiguous:
        return arrays[0]
    out = empty(like, (len(arrays), *like.shape))
    copy([(out[number, ...], array) for number, array in enumerate(arrays)])
    return out


def rows_of(spread: Spread, operand: Any) -> dict[int, Array]:
    """This instance's values by the number of their member."""
    return {int(number): operand[place] for place, number in enumerate(spread.mine.tolist())}
