"""mpi4py on real processes: each holds a block of the replicas, and works on it with NumPy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from bench.cases import FOLDS, RAGGED, SOURCE, Case

from .base import Peer, Samples, Unserved, pick

Call = Callable[[], Any]
Array = NDArray[Any]


class Mpi(Peer):
    """One process of several; all of them get the same commands."""

    name = "MPI"

    def __init__(self) -> None:
        self._call: Call | None = None

    def prepare(self, case: Case) -> None:
        size, rank = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
        if case.replicas % size:
            raise Unserved(f"{case.replicas} replicas do not divide among {size} processes")
        if case.collective in FOLDS and case.dtype != np.float32:
            raise Unserved(f"MPI does not add {case.arithmetic.dtype}")
        count = case.replicas // size
        self._mine = range(rank * count, (rank + 1) * count)
        self._mapped = case.mapped
        self._call = MAKERS[case.collective](case, case.values(self._mine))
        self.run(1)

    def run(self, repeats: int) -> list[float]:
        assert self._call is not None
        seconds = []
        for _ in range(repeats):
            MPI.COMM_WORLD.Barrier()
            start = time.perf_counter()
            self._call()
            seconds.append(time.perf_counter() - start)
        return seconds

    def sample(self, replicas: list[int], positions: list[int]) -> Samples:
        assert self._call is not None
        result = self._call()
        return {
            r: pick(result[r - self._mine.start] if self._mapped else result, positions)
            for r in replicas
            if r in self._mine
        }

    def release(self) -> None:
        self._call = None


def wire(array: Array) -> list[Any]:
    """A buffer of bytes: MPI need not know the dtype of values that it only moves."""
    return [array.reshape(-1).view(np.uint8), MPI.BYTE]


def _partial(x: Array, reduce: np.ufunc) -> tuple[Array, Call]:
    """Where this process's own fold is, and what makes it."""
    if len(x) == 1:
        return x[0], lambda: None
    partial = np.empty_like(x[0])
    return partial, lambda: reduce.reduce(x, axis=0, out=partial)


def _all_reduce(case: Case, x: Array) -> Call:
    reduce, op = (np.maximum, MPI.MAX) if case.collective == "pmax" else (np.add, MPI.SUM)
    partial, fold = _partial(x, reduce)
    out = np.empty_like(x[0])

    def call() -> Array:
        fold()
        MPI.COMM_WORLD.Allreduce(partial, out, op)
        if case.collective == "pmean":
            np.divide(out, np.float32(case.replicas), out=out)
        return out

    return call


def _reduce_scatter(case: Case, x: Array) -> Call:
    partial, fold = _partial(x, np.add)
    out = np.empty((len(x), x.shape[2]), x.dtype)

    def call() -> Array:
        fold()
        MPI.COMM_WORLD.Reduce_scatter_block(partial, out, MPI.SUM)
        return out

    return call


def _all_gather(case: Case, x: Array) -> Call:
    out = np.empty((case.replicas, *x.shape[1:]), x.dtype)

    def call() -> Array:
        MPI.COMM_WORLD.Allgather(wire(x), wire(out))
        return out

    return call


def _broadcast(case: Case, x: Array) -> Call:
    root, place = divmod(SOURCE, len(x))
    value = x[place]

    def call() -> Array:
        MPI.COMM_WORLD.Bcast(wire(value), root)
        return value

    return call


def _all_to_all(case: Case, x: Array) -> Call:
    """With several replicas to a process, slices are packed by receiver and unpacked again."""
    size, count = MPI.COMM_WORLD.size, len(x)
    if count == 1:
        straight = np.empty_like(x)

        def exchange() -> Array:
            MPI.COMM_WORLD.Alltoall(wire(x), wire(straight))
            return straight

        return exchange
    width = x.shape[2]
    packed = np.empty((size, count, count, width), x.dtype)
    arrived, out = np.empty_like(packed), np.empty_like(x)
    by_receiver = x.reshape(count, size, count, width).swapaxes(0, 1)
    by_sender = out.reshape(count, size, count, width).transpose(1, 2, 0, 3)

    def call() -> Array:
        np.copyto(packed, by_receiver)  # (process, sender, receiver, element)
        MPI.COMM_WORLD.Alltoall(wire(packed), wire(arrived))
        np.copyto(by_sender, arrived)
        return out

    return call


def _shift(case: Case, x: Array) -> Call:
    size, rank = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
    out = np.empty_like(x)

    def call() -> Array:
        out[1:] = x[:-1]
        up, down = (rank + 1) % size, (rank - 1) % size
        MPI.COMM_WORLD.Sendrecv(wire(x[-1]), up, recvbuf=wire(out[0]), source=down)
        return out

    return call


def _ragged(case: Case, x: Array) -> Call:
    """Alltoallv of rows, packed by receiving process where a process has several replicas."""
    size, rank, count = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank, len(x)
    plan, mine = case.plan, slice(rank * count, (rank + 1) * count)
    rows = plan.sizes.reshape(size, count, size, count)
    sent, received = rows[rank].sum(axis=(0, 2)), rows[:, :, rank].sum(axis=(1, 2))
    flat = x.reshape(-1, case.row)
    out = np.zeros((count, plan.output_rows, case.row), x.dtype)
    # Packed by (receiving process, sender, receiver), each slice in its order.
    order = [
        (sender, receiver)
        for process in range(size)
        for sender in range(count)
        for receiver in range(process * count, (process + 1) * count)
    ]
    own, starts = plan.sizes[mine], plan.input_offsets[mine]
    source = _rows([(s * x.shape[1] + starts[s, r], own[s, r]) for s, r in order])
    arriving = [(s, r) for s in range(case.replicas) for r in range(mine.start, mine.stop)]
    target = _rows(
        [
            ((r - mine.start) * plan.output_rows + plan.output_offsets[s, r], plan.sizes[s, r])
            for s, r in arriving
        ]
    )
    packed = flat if _straight(source, len(flat)) else np.empty((len(source), case.row), x.dtype)
    flat_out = out.reshape(-1, case.row)
    straight = _straight(target, len(flat_out))
    arrived = flat_out if straight else np.empty((len(target), case.row), x.dtype)
    row = MPI.BYTE.Create_contiguous(case.row * case.dtype.itemsize).Commit()

    def call() -> Array:
        if packed is not flat:
            np.take(flat, source, axis=0, out=packed, mode="clip")
        send, receive = [packed, sent, row], [arrived, received, row]
        MPI.COMM_WORLD.Alltoallv(send, receive)
        if not straight:
            flat_out[target] = arrived
        return out

    return call


def _rows(slices: list[tuple[int, int]]) -> NDArray[np.int64]:
    """The numbers of all rows of some slices (start, rows)."""
    return np.concatenate([np.arange(start, start + rows) for start, rows in slices])


def _straight(rows: NDArray[np.int64], count: int) -> bool:
    return len(rows) == count and bool((rows == np.arange(count)).all())


MAKERS: dict[str, Callable[[Case, Array], Call]] = {
    "psum": _all_reduce,
    "pmean": _all_reduce,
    "pmax": _all_reduce,
    "psum_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "pbroadcast": _broadcast,
    "all_to_all": _all_to_all,
    "ppermute": _shift,
    **dict.fromkeys(RAGGED, _ragged),
}
