"""Which replicas this process holds, of how many; and the World that it shares with the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpusim import environment
from gpusim.errors import GpusimError
from gpusim.poptorch.options import Options
from gpusim.world import World, current_world

__all__ = ["Instances"]

TOTAL = "globalReplicationFactor"  # popdist.poptorch.Options say it, under PopART's name


class Instances:
    """The replicas of an executor.

    With popdist.poptorch.Options under poprun, or inside `with world:`, they are a part of all
    instances' replicas, and gradients are reduced over all of them.

    **Arguments**

    - `options`: how many replicas there are here.

    Attributes: `total`, `first` and `local` numbers of replicas.

    >>> instances = Instances(Options().replicationFactor(4))
    >>> instances.total, instances.first, instances.local
    (4, 0, 4)
    """

    def __init__(self, options: Options) -> None:
        self.local = int(options.replication_factor)
        self._world = current_world()
        together = int(options._Popart.options.get(TOTAL, self.local)) > self.local
        if self._world is None and together and environment.read().instances > 1:
            self._world = World.from_environment()
        if self._world is None:
            self.total, self.first = self.local, 0
            return
        if self._world.local_replicas != self.local:
            raise ValueError(
                f"replication_factor={self.local}: expected {self._world.local_replicas}, as this "
                f"instance holds in {self._world}"
            )
        self.total, self.first = self._world.replicas, self._world.replica_offset

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block in which collectives over the replicas reach those of the other instances.

        GpusimError inside another `with world:` than the model was compiled in.
        """
        around = current_world()
        if around is not None and around is not self._world:
            raise GpusimError(
                f"the model was compiled for {self.total} replicas, {self.local} of them here, and "
                f"is called in {around}; compile it there"
            )
        if self._world is None or around is not None:
            yield
            return
        with self._world:
            yield
