"""Sources that are made of others: an array from each worker, several joined to one value, and
recorded workers drawn again for any number of replicas."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.tools.study.arrays import Array, Source
from gpusim.tools.study.synthetic import draw_words

__all__ = ["RESAMPLE", "Joined", "Resampled", "Workers", "workers_of"]

RESAMPLE = ("workers", "elements")
"""How recorded workers are drawn again."""

# Streams of the input's generator: distributions have 0 and 1.
STREAMS = {"workers": 2, "elements": 3}
GATHERED = 1 << 22
"""The most numbers that are read at a time, where only some are taken."""


@dataclass(frozen=True)
class Workers:
    """An array from each worker, in order; each may be mapped from a file of its own."""

    arrays: tuple[Array, ...]
    name: str
    scale: float = 1.0

    @property
    def replicas(self) -> int | None:
        return len(self.arrays)

    @property
    def elements(self) -> int:
        return self.arrays[0].elements

    @property
    def title(self) -> str:
        return f"{self.name}, {self.elements:,} elements"

    @property
    def identity(self) -> dict[str, Any]:
        """As if the arrays were the rows of one."""
        return {"kind": "workers", "arrays": [each.identity for each in self.arrays]}

    def block(self, replicas: int, rows: range, first: int, count: int) -> NDArray[Any]:
        return np.concatenate(
            [self.arrays[row].block(1, range(1), first, count) for row in rows]
        ).reshape(len(rows), count)


def workers_of(arrays: Sequence[tuple[str, NDArray[Any]]], name: str) -> Workers:
    """One value from each worker, with the names that errors have.

    **Raises**: ValueError where shapes or dtypes differ, or an array holds no real numbers.
    """
    first, one = arrays[0]
    for title, values in arrays:
        if (values.shape, values.dtype) != (one.shape, one.dtype):
            raise ValueError(
                f"{title}: {values.dtype.name} of shape {values.shape}; expected "
                f"{one.dtype.name} of shape {one.shape}, as in {first}"
            )
    return Workers(tuple(Array(values[np.newaxis], title) for title, values in arrays), name)


@dataclass(frozen=True)
class Joined:
    """Several sources as one value: their elements one after the other, as in a bucket."""

    sources: tuple[Source, ...]
    name: str
    ends: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        ends = accumulate(source.elements for source in self.sources)
        object.__setattr__(self, "ends", tuple(ends))

    @property
    def replicas(self) -> int | None:
        counts = [source.replicas for source in self.sources]
        return min((count for count in counts if count is not None), default=None)

    @property
    def elements(self) -> int:
        return self.ends[-1]

    @property
    def scale(self) -> float:
        return self.sources[0].scale

    @property
    def title(self) -> str:
        return f"{self.name}, {len(self.sources)} arrays as one, {self.elements:,} elements"

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": "joined", "arrays": [source.identity for source in self.sources]}

    def block(self, replicas: int, rows: range, first: int, count: int) -> NDArray[Any]:
        parts = []
        at = bisect_right(self.ends, first)
        while count:
            begin = first - (self.ends[at - 1] if at else 0)
            size = min(count, self.sources[at].elements - begin)
            part = self.sources[at].block(replicas, rows, begin, size)
            parts.append(part.astype(np.float64, copy=False))  # which holds every source's values
            first, count, at = first + size, count - size, at + 1
        return np.concatenate(parts, axis=1)


@dataclass(frozen=True)
class Resampled:
    """Recorded workers, drawn again with replacement for any number of replicas.

    "workers": each replica has all values of one worker, drawn at random. "elements": each element
    of each replica is drawn alone, from the workers' values of that element, so that elements
    do not depend on each other. Draws are counter-based: replica 7 has the same values among 8
    replicas as among 4,096.
    """

    source: Source
    how: str
    seed: int
    step: int = 0

    replicas = None  # any number

    @property
    def elements(self) -> int:
        return self.source.elements

    @property
    def scale(self) -> float:
        return self.source.scale

    @property
    def recorded(self) -> int:
        """The number of workers."""
        count = self.source.replicas
        assert count is not None
        return count

    @property
    def title(self) -> str:
        what = "" if self.how == "workers" else " by element"
        drawn = f"{self.recorded:,} workers drawn with replacement{what}"
        name, _, rest = self.source.title.partition(",")
        return f"{name}, {drawn} (seed {self.seed}),{rest}"

    @property
    def identity(self) -> dict[str, Any]:
        return {**self.source.identity, "resample": self.how, "resample seed": self.seed}

    def at_step(self, step: int) -> Resampled:
        """The draws of another step."""
        return Resampled(self.source, self.how, self.seed, step)

    def drawn(self, rows: range, first: int, count: int) -> NDArray[np.intp]:
        """Which worker each element of each row is from; of "workers" one column."""
        stream = STREAMS[self.how] + 16 * self.step
        words = draw_words(self.seed, rows, stream, first, count)
        # The upper half of a 96-bit product: each worker has 2**64 / n words, rounded.
        count_of = np.uint64(self.recorded)
        high, low = words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)
        numbers = (high * count_of + ((low * count_of) >> np.uint64(32))) >> np.uint64(32)
        return numbers.astype(np.intp)

    def block(self, replicas: int, rows: range, first: int, count: int) -> NDArray[Any]:
        recorded = self.recorded
        if self.how == "workers":
            chosen = self.drawn(rows, 0, 1)[:, 0]
            there, places = np.unique(chosen, return_inverse=True)
            parts = [
                self.source.block(recorded, range(int(w), int(w) + 1), first, count) for w in there
            ]
            return np.concatenate(parts)[places.reshape(-1)]
        chosen = self.drawn(rows, first, count)
        step = max(1, GATHERED // recorded)
        parts = []
        for begin in range(0, count, step):
            size = min(step, count - begin)
            values = self.source.block(recorded, range(recorded), first + begin, size)
            parts.append(np.take_along_axis(values, chosen[:, begin : begin + size], axis=0))
        return np.concatenate(parts, axis=1)
