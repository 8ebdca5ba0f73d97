"""The World inside `execute_on_instances`, which has some of the instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.runtime.engines import Buffer, Engine, Pending
from gpusim.runtime.world import World, current_world, without_world

__all__ = ["SubsetEngine", "run_among"]

Array = NDArray[Any]
OPERATORS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
}
TAG = (1 << 22) - 2  # of this engine's own messages


class SubsetEngine:
    """Some instances of an engine, numbered from 0; see `gpusim.runtime.engines.Engine`."""

    def __init__(self, engine: Engine, chosen: tuple[int, ...]) -> None:
        self._engine = engine
        self._chosen = chosen
        self.instances = len(chosen)
        self.instance = chosen.index(engine.instance)

    def prepare(self, array: Array) -> None:
        """Do nothing: resources of all instances must exist before."""

    def exchange(self, sends: Sequence[Buffer], receives: Sequence[Buffer], tag: int) -> Pending:
        return self._engine.exchange(self._translated(sends), self._translated(receives), tag)

    def _translated(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        return [(buffer, self._chosen[other]) for buffer, other in buffers]

    def all_reduce(self, array: Array, op: str) -> Array:
        try:
            operator = OPERATORS[op]
        except KeyError:
            raise TypeError(f"no all-reduce for op={op!r} among some of the instances") from None
        stacked = np.empty((self.instances, *array.shape), array.dtype)
        stacked[self.instance] = array
        others = [i for i in range(self.instances) if i != self.instance]
        sends = [(np.ascontiguousarray(array), i) for i in others]
        self.exchange(sends, [(stacked[i, ...], i) for i in others], TAG).wait()
        return np.asarray(reduce(operator, stacked)).astype(array.dtype, copy=False)

    def barrier(self) -> None:
        self.all_reduce(np.zeros(1, np.uint8), "sum")

    def abort(self, message: str) -> None:
        self._engine.abort(message)

    def close(self) -> None:
        """Do nothing: the engine belongs to all instances."""


def run_among(chosen: tuple[int, ...], call: Callable[[], Any]) -> Any:
    """Return `call()`, during which the current World, if any, has only the chosen instances.

    Their replicas are numbered from 0.
    """
    outer = current_world()
    if outer is None or outer.engine is None or len(chosen) == outer.instances:
        return call()
    engine = SubsetEngine(outer.engine, chosen) if len(chosen) > 1 else None
    inner = World([outer.counts[i] for i in chosen], engine, check=outer.check)
    with without_world(), inner:
        return call()
