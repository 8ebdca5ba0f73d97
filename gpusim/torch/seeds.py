"""Seeds for what is random in a replica, drawn from `gpusim.rng`'s streams: another one for each
replica and call, and the same in `vmap`, in `pmap` and in a graph."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..maps.axis_environment import AxisName, axis_environment
from ..maps.mapped_array.array import unpack
from ..random import rng
from .axes import is_traced
from .graph_operators import graph_operator
from .tensors import as_tensor

__all__ = ["seeded", "seeds"]

CALLS = 2**32
"""The number of draws of a step before they would repeat the next step's."""


class SeedStreams:
    """The generators of one seed, one for each set of axes."""

    def __init__(self, seed: int, step: int = 0) -> None:
        self.seed = seed
        self._first = step * CALLS
        self._generators: dict[tuple[AxisName, ...], rng] = {}
        self._lock = threading.Lock()

    def draw(self, names: tuple[AxisName, ...], count: int) -> tuple[Any, Any]:
        """int64 numbers of all replicas here (*axes, count), and those axes."""
        with self._lock:
            generator = self._generators.get(names)
            if generator is None:
                generator = rng(self.seed, names, calls=self._first)
                self._generators[names] = generator
        return unpack(generator.integers(0, 2**63 - 1, shape=count, dtype=np.int64))


_seeded: ContextVar[SeedStreams | None] = ContextVar("gpusim seeds of replicas", default=None)
_of_torch = SeedStreams(0)
_changing = threading.Lock()


@contextmanager
def seeded(seed: int, step: int = 0) -> Iterator[None]:
    """Make the draws inside depend on `seed` and `step`, and on the replica and its calls.

    Elsewhere it depends on the seed that torch has, and on the calls since it was set to another.

    **Arguments**:

    - `seed`: 0 to 2**64 - 1.
    - `step`: the number of a micro-batch, say, 0 to 2**32 - 1.

    **Raises**:

    - TypeError, ValueError: by the draws, for a seed that `gpusim.rng` does not take.

    >>> import torch, gpusim.torch as gt
    >>> from gpusim.torch.seeds import seeded, seeds
    >>> draw = gt.vmap(lambda: seeds(1), axis_name="i", axis_size=2)
    >>> with seeded(0):
    ...     first, second = draw(), draw()
    >>> with seeded(0):
    ...     again = draw()
    >>> torch.equal(first, again), torch.equal(first, second), len(first.unique())
    (True, False, 2)
    """
    token = _seeded.set(SeedStreams(seed, step))
    try:
        yield
    finally:
        _seeded.reset(token)


def seeds(count: int) -> Tensor:
    """int64 numbers (count,), each 0 to 2**63 - 2 and of each replica its own.

    Where no axis has a name they are torch's, and torch's rules for random functions hold. A graph
    of one replica draws when it runs; one that is traced around a map has numbers as constants.
    """
    if not any(entry.name is not None for entry in axis_environment()):
        return torch.randint(0, 2**63 - 1, (count,), dtype=torch.int64)
    found: Tensor = _seeds(count)
    return found


def _run(count: int) -> Tensor:
    entries = [entry for entry in axis_environment() if entry.name is not None]
    if any(is_traced(entry.name) for entry in entries):
        return torch.zeros((count,), dtype=torch.int64)  # a fake one: a graph calls this later
    drawn, axes = _draws().draw(tuple(dict.fromkeys(entry.name for entry in entries)), count)
    table = as_tensor(np.ascontiguousarray(drawn)).reshape(-1, count)
    row: Any = 0
    for axis in axes:  # the markers are batched where the axes are
        row = row * axis.size + axis.marker.long()
    return table[0] if not axes else table.to(row.device).index_select(0, row.reshape(1))[0]


def _draws() -> SeedStreams:
    global _of_torch
    found = _seeded.get()
    if found is not None:
        return found
    with _changing:  # or replicas in threads would count in several
        if _of_torch.seed != torch.initial_seed() % 2**64:
            _of_torch = SeedStreams(torch.initial_seed() % 2**64)
        return _of_torch


_seeds = graph_operator("seeds(int count) -> Tensor", _run)
