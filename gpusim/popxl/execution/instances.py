"""The instances that share an Ir's replicas. Only this module of popxl knows worlds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gpusim.collectives import Collective
from gpusim.runtime.world import World, current_world

__all__ = ["Instances"]


@dataclass(frozen=True)
class Instances:
    """The replicas of this instance among those of all instances, and the world between them."""

    replicas: int  #: of this instance
    total: int  #: of all instances
    world: World | None = None  #: None if this is the only instance

    @classmethod
    def connect(cls, replicas: int, total: int) -> Instances:
        """This instance's replicas, in the world of the environment if there are others."""
        if replicas == total:
            return cls(replicas, total)
        return cls(replicas, total, current_world() or World.from_environment())

    @property
    def offset(self) -> int:
        """The number of this instance's first replica."""
        return 0 if self.world is None else self.world.replica_offset

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """A block in which the instances exchange values; an error in it ends all of them."""
        if self.world is None or current_world() is not None:
            yield
            return
        with self.world:
            yield

    def run(self, collective: Collective[Any], *values: Any, **options: Any) -> Any:
        """Run a collective of `gpusim.collectives` over the replicas of all instances."""
        return collective.on(self.world, *values, **options)
