"""The layout of a group's members over a world's instances, and the exchange of their values."""

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
from ...runtime.world import MAIN_TAG, World
from ..kernels import copy, empty
from ..operand import Array, as_slice

Numbers = NDArray[np.intp]

#: Parts of at least this many bytes are sent in place, without packing.
LONG_MESSAGE = 16 * 1024


class _Tables(NamedTuple):
    """The lookup tables of a `Layout`."""

    members_of: tuple[Numbers, ...]
    instance_of: Numbers
    position: Numbers


@lru_cache(64)  # programs make the same calls again and again
def _tables(shape: tuple[int, ...], axis: int, counts: tuple[int, ...]) -> _Tables:
    numbers = np.arange(math.prod(shape)).reshape(shape)
    edges = np.cumsum(counts)[:-1]
    members_of = tuple(part.ravel() for part in np.split(numbers, edges, axis=axis))
    instance_of, position = np.empty(numbers.size, np.intp), np.empty(numbers.size, np.intp)
    for instance, members in enumerate(members_of):
        instance_of[members] = instance
        position[members] = np.arange(len(members))
    for array in (*members_of, instance_of, position):
        array.flags.writeable = False
    return _Tables(members_of, instance_of, position)


@dataclass(frozen=True)
class Layout:
    """The members of a group over several axes, one of them sharded over a world's instances.

    Members are numbered row-major in the axes' order; an instance holds those with its indices of
    the shared axis, in ascending order.

    **Attributes**:

    - `world`: the world.
    - `shape`: the size of each axis, on all instances.
    - `axis`: which of them is shared out.
    - `counts`: how many indices of that axis each instance holds.
    - `tag`: the channel on which the instances exchange.
    """

    world: World
    shape: tuple[int, ...]
    axis: int
    counts: tuple[int, ...]
    tag: int = MAIN_TAG

    @classmethod
    def of_world(cls, world: World) -> Layout:
        """The layout of a world's replicas, outside of any map."""
        return cls(world, (world.replicas,), 0, world.counts)

    @property
    def engine(self) -> Engine:
        engine = self.world.engine
        assert engine is not None  # a single instance holds all members
        return engine

    @property
    def instance(self) -> int:
        """The number of this instance."""
        return self.world.instance

    @property
    def others(self) -> list[int]:
        return [instance for instance in range(self.world.instances) if instance != self.instance]

    @property
    def size(self) -> int:
        """The number of members, on all instances."""
        return math.prod(self.shape)

    @property
    def members_of(self) -> tuple[Numbers, ...]:
        """The members of each instance."""
        return self._tables.members_of

    @property
    def instance_of(self) -> Numbers:
        """The instance of each member."""
        return self._tables.instance_of

    @property
    def position(self) -> Numbers:
        """The position of each member among those of its instance."""
        return self._tables.position

    @cached_property
    def _tables(self) -> _Tables:
        return _tables(self.shape, self.axis, self.counts)

    @property
    def local(self) -> Numbers:
        """The members of this instance."""
        return self.members_of[self.instance]

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


def all_gather_bytes(layout: Layout, own: bytes) -> list[bytes]:
    """The byte strings of all instances; their lengths may differ."""
    lengths = np.zeros((layout.world.instances, 1), np.int64)
    lengths[layout.instance] = len(own)
    layout.exchange(
        [(lengths[layout.instance].copy(), i) for i in layout.others],
        [(lengths[i], i) for i in layout.others],
    ).wait()
    said = [np.zeros(length, np.uint8) for length in lengths[:, 0].tolist()]
    said[layout.instance][:] = np.frombuffer(own, np.uint8)
    layout.exchange(
        [(said[layout.instance], i) for i in layout.others], [(said[i], i) for i in layout.others]
    ).wait()
    return [text.tobytes() for text in said]


def fetch(
    layout: Layout, rows: Mapping[int, Array], needs: Sequence[Numbers], like: Array
) -> Array:
    """The values of members that may be anywhere.

    **Arguments**:

    - `rows`: the values of this instance's members, by number; all of one shape.
    - `needs`: for each instance the members that it asks for, ascending.
    - `like`: any array of their library, shape and dtype.

    **Returns**: A new array (needed, *shape) in the order of ``needs``.
    """
    needed = needs[layout.instance]
    out = empty(like, (len(needed), *like.shape))
    sends: list[Buffer] = []
    for other in layout.others:
        wanted = needs[other][layout.instance_of[needs[other]] == layout.instance]
        sends.append((pack([rows[number] for number in wanted.tolist()], like), other))
    receives: list[Buffer] = []
    scattered: list[tuple[Array, Array]] = []
    for other in layout.others:
        places = np.flatnonzero(layout.instance_of[needed] == other)
        run = as_slice(places.tolist()) if len(places) else slice(0, 0)
        if run is not None and (run.step or 1) == 1:
            receives.append((out[run], other))
            continue
        buffer = empty(like, (len(places), *like.shape))
        receives.append((buffer, other))
        scattered += [(out[p, ...], buffer[row, ...]) for row, p in enumerate(places.tolist())]
    pending = layout.exchange(sends, receives)
    here = np.flatnonzero(layout.instance_of[needed] == layout.instance).tolist()
    copy([(out[place, ...], rows[int(needed[place])]) for place in here])
    pending.wait()
    copy(scattered)
    return out


def pack(arrays: Sequence[Array], like: Array) -> Array:
    """Arrays of one shape, one behind the other; a single contiguous one as it is."""
    if len(arrays) == 1 and arrays[0].flags.c_contiguous:
        return arrays[0]
    out = empty(like, (len(arrays), *like.shape))
    copy([(out[number, ...], array) for number, array in enumerate(arrays)])
    return out


def rows_of(layout: Layout, operand: Any) -> dict[int, Array]:
    """This instance's values by the number of their member."""
    return {int(number): operand[place] for place, number in enumerate(layout.local.tolist())}
