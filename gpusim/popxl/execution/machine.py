"""What steps work on: this instance's replicas, and their streams, variables and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.collectives import Collective, all_gather
from gpusim.libraries import to_host

__all__ = ["HostBuffer", "Machine"]

Array = Any


class HostBuffer:
    """One stream's host side during a run: (transfers, replicas, *shape), and where it stands.

    Every transfer takes the next entry, and after the last one the first again, as PopART's buffers
    do. Replicas that have branched off stand where they are.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        self.positions = [0] * array.shape[1]
        self.together = True

    def next(self, rows: NDArray[np.int64] | None) -> tuple[Any, ...]:
        """The index of the next entry of all replicas, or of some; it counts as taken."""
        transfers = self.array.shape[0]
        if rows is None and self.together:
            now = self.positions[0]
            self.positions[0] = (now + 1) % transfers
            return (now,)
        if self.together:
            self.positions = [self.positions[0]] * self.array.shape[1]
            self.together = False
        taken = np.arange(self.array.shape[1]) if rows is None else rows
        now_at = np.array([self.positions[row] for row in taken.tolist()])
        for row in taken.tolist():
            self.positions[row] = (self.positions[row] + 1) % transfers
        return now_at, taken


class Machine:
    """The replicas of this instance while a session runs, with all that outlives one op."""

    def __init__(
        self, replicas: int, *, offset: int = 0, total: int | None = None, arrays: str = "numpy"
    ) -> None:
        self.replicas = replicas  #: of this instance
        self.offset = offset  #: the number of the first of them
        self.total = replicas if total is None else total  #: of all instances
        self.xp = library(arrays)
        self.rows: NDArray[np.int64] | None = None  #: those that run now, if not all
        self.one_by_one = False
        self.variables: dict[str, Array] = {}  #: by the tensor's id: (replicas, *shape)
        self.remote: dict[int, Array] = {}  #: by the buffer's id: (replicas, entries, *shape)
        self.inputs: dict[str, HostBuffer] = {}  #: by the stream's id
        self.outputs: dict[str, HostBuffer] = {}
        self.world: Any = None

    @property
    def count(self) -> int:
        """How many replicas run now."""
        return self.replicas if self.rows is None else len(self.rows)

    @contextmanager
    def narrowed(self, rows: NDArray[np.int64]) -> Iterator[None]:
        """Let some of the replicas that run now go on alone."""
        around = self.rows
        self.rows = rows if around is None else around[rows]
        try:
            yield
        finally:
            self.rows = around

    def need_all(self, what: str) -> None:
        """RuntimeError where some replicas have branched off."""
        if self.rows is not None:
            raise RuntimeError(
                f"{what} in a branch of a conditional that only replicas {self.rows.tolist()} of "
                f"{self.replicas} have taken: a collective needs all of them"
            )

    # Host and device

    def upload(self, values: NDArray[Any]) -> Array:
        """A host array in the library of this machine."""
        return values if self.xp is np else self.xp.asarray(values)

    def download(self, values: Array) -> NDArray[Any]:
        """An array of this machine on the host."""
        return to_host(values)

    def replicated(self, value: NDArray[Any]) -> Array:
        """One value for all replicas, stored once: (replicas, *shape) with stride 0."""
        array = self.upload(value)
        return self.xp.broadcast_to(array, (self.replicas, *array.shape))

    def rows_of(self, array: Array, replicas: Sequence[int]) -> NDArray[Any]:
        """The values of some replicas of the whole program, on the host."""
        if self.total == self.replicas:
            return self.download(array[list(replicas)])
        every = self.collective(all_gather, array)
        return self.download(every.value[list(replicas)])

    # Collectives

    def collective(self, collective: Collective[Any], *values: Array, **options: Any) -> Any:
        """A collective over the replicas of all instances."""
        world = None if self.total == self.replicas else self.world
        return collective.on(world, *values, **options)

    # Streams

    def load(self, stream: str) -> Array:
        """The next entry of a host stream, for the replicas that run now: (replicas, *shape)."""
        buffer = self.inputs[stream]
        return self.upload(buffer.array[buffer.next(self.rows)])

    def store(self, stream: str, value: Array) -> None:
        """Put a value into the next entry of a stream to the host."""
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
