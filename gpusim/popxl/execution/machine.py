"""Machine: the replicas of this instance, with their streams, variables and remote buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.collectives import all_gather
from gpusim.libraries import to_host
from gpusim.maps.records import NOBODY, called_by

from .instances import Instances

__all__ = ["HostBuffer", "Machine"]

Array = Any


class HostBuffer:
    """The host side of a stream during a run: (transfers, replicas, *shape), and its positions.

    Every transfer takes the next entry, and after the last one the first again, as PopART's buffers
    do. Replicas that take another branch keep their position.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        self.positions = [0] * array.shape[1]
        self.together = True

    def next(self, rows: NDArray[np.int64] | None) -> tuple[Any, ...]:
        """Advance all replicas, or some; the index of the entry that they were at."""
        transfers = self.array.shape[0]
        if rows is None and self.together:
            now = self.positions[0]
            self.positions[0] = (now + 1) % transfers
            return (now,)
        if self.together:
            self.positions = [self.positions[0]] * self.array.shape[1]
            self.together = False
        moved = np.arange(self.array.shape[1]) if rows is None else rows
        now_at = np.array([self.positions[row] for row in moved.tolist()])
        for row in moved.tolist():
            self.positions[row] = (self.positions[row] + 1) % transfers
        return now_at, moved


class Machine:
    """The replicas of this instance, and all state that outlives one op."""

    def __init__(
        self, instances: Instances, arrays: str = "numpy", one_by_one: bool = False
    ) -> None:
        self.instances = instances
        self.replicas, self.total = instances.replicas, instances.total
        self.offset = instances.offset
        self.xp = library(arrays)
        self.rows: NDArray[np.int64] | None = None  #: the replicas that run now, if not all
        self.one_by_one = one_by_one
        self.variables: dict[str, Array] = {}  #: by the tensor's id: (replicas, *shape)
        self.remote: dict[int, Array] = {}  #: by the buffer's id: (replicas, entries, *shape)
        self.inputs: dict[str, HostBuffer] = {}  #: by the stream's id
        self.outputs: dict[str, HostBuffer] = {}

    @property
    def count(self) -> int:
        """The number of replicas that run now."""
        return self.replicas if self.rows is None else len(self.rows)

    @contextmanager
    def restrict(self, rows: NDArray[np.int64]) -> Iterator[None]:
        """Run only some of the replicas that run now."""
        outer = self.rows
        self.rows = rows if outer is None else outer[rows]
        try:
            yield
        finally:
            self.rows = outer

    def need_all(self, what: str) -> None:
        """Raise RuntimeError if only some replicas run now."""
        if self.rows is not None:
            raise RuntimeError(
                f"{what} in a branch of a conditional that only replicas {self.rows.tolist()} of "
                f"{self.replicas} have taken: a collective needs all of them"
            )

    # Host and device

    def upload(self, values: NDArray[Any]) -> Array:
        """A host array as an array of this machine's library."""
        return values if self.xp is np else self.xp.asarray(values)

    def download(self, values: Array) -> NDArray[Any]:
        """A copy on the host of an array of this machine."""
        return to_host(values)

    def replicate(self, value: NDArray[Any]) -> Array:
        """One value for all replicas, stored once: (replicas, *shape) with stride 0."""
        array = self.upload(value)
        return self.xp.broadcast_to(array, (self.replicas, *array.shape))

    def rows_of(self, array: Array, replicas: Sequence[int]) -> NDArray[Any]:
        """The values of some replicas of the whole program, on the host."""
        if self.total == self.replicas:
            return self.download(array[list(replicas)])
        with called_by(NOBODY):
            every = self.instances.run(all_gather, array)
        return self.download(every.value[list(replicas)])

    # Streams

    def load(self, stream: str) -> Array:
        """The next entry of a host stream, for the replicas that run now: (replicas, *shape)."""
        buffer = self.inputs[stream]
        return self.upload(buffer.array[buffer.next(self.rows)])

    def store(self, stream: str, value: Array) -> None:
        """Store a value in the next entry of a stream to the host."""
        buffer = self.outputs[stream]
        buffer.array[buffer.next(self.rows)] = self.download(value)

    # Remote buffers

    def remote_rows(self) -> Array:
        """The replicas that run now, as an index of remote buffers."""
        rows = np.arange(self.replicas) if self.rows is None else self.rows
        return rows if self.xp is np else self.xp.asarray(rows)


def library(name: str) -> Any:
    """NumPy or CuPy, by name."""
    if name == "numpy":
        return np
    if name == "cupy":
        import cupy

        return cupy
    raise ValueError(f"arrays={name!r}: expected 'numpy' or 'cupy'")
