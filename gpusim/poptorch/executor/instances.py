"""The replicas that this process holds, and the World that it shares with other processes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gpusim.errors import GpusimError
from gpusim.poptorch.options import Options
from gpusim.poptorch.poptorch_core import createPoptorchError
from gpusim.runtime import environment
from gpusim.runtime.world import World, current_world

__all__ = ["Instances"]

TOTAL = "globalReplicationFactor"  # popdist.poptorch.Options say it, under PopART's name
APART = (
    "Options.Distributed says that this is process {} of {}, which train as one, and they cannot "
    "reach each other: {}. Start them with poprun or mpirun (with popdist.poptorch.Options the "
    "first says all that there is to say), call the model inside a gpusim.World, or call "
    "Options.Distributed.disable() for a process that is alone."
)


class Instances:
    """The replicas of an executor.

    With popdist.poptorch.Options under poprun, with several processes in `Options.Distributed`, or
    inside `with world:`, gradients are reduced over the replicas of all instances.

    **Arguments**

    - `options`: they give the number of replicas of this instance.

    poptorch.Error for processes in `Options.Distributed` that no launcher has started; ValueError
    for other replicas than the world has here.

    **Attributes**: `total`, `first` and `local` numbers of replicas.

    >>> instances = Instances(Options().replicationFactor(4))
    >>> instances.total, instances.first, instances.local
    (4, 0, 4)
    """

    def __init__(self, options: Options) -> None:
        self.local = int(options.replication_factor)
        self._world = current_world() or world_of(options)
        if self._world is None:
            self.total, self.first = self.local, 0
            return
        if self._world.local_replicas != self.local:
            raise ValueError(
                f"replication_factor={self.local}: expected {self._world.local_replicas}, as this "
                f"instance holds in {self._world}"
            )
        self.total, self.first = self._world.replicas, self._world.replica_offset

    @property
    def replicas(self) -> range:
        """The numbers of the local replicas."""
        return range(self.first, self.first + self.local)

    def together(self) -> AbstractContextManager[Any]:
        """A block in which collectives over the replicas reach those of the other instances.

        **Raises**:

        - GpusimError: inside another `with world:` than the model was compiled in.
        """
        around = current_world()
        if around is not None and around is not self._world:
            raise GpusimError(
                f"the model was compiled for {self.total} replicas, {self.local} of them here, and "
                f"is called in {around}; compile it there"
            )
        return nullcontext() if self._world is None or around is not None else self._world


def world_of(options: Options) -> World | None:
    """The world that the options ask for; None for a single process."""
    if TOTAL not in options._Popart.options:
        return distributed(options)
    several = int(options._Popart.options[TOTAL]) > options.replication_factor
    return World.from_environment() if several and environment.read().instances > 1 else None


def distributed(options: Options) -> World | None:
    """The world of the processes in `Options.Distributed`; all have the same number of replicas."""
    process, processes = options.Distributed.processId, options.Distributed.numProcesses
    if processes == 1:
        return None
    try:
        launch = environment.read()
        if (launch.instance, launch.instances) != (process, processes):
            raise ValueError(f"it was started as process {launch.instance} of {launch.instances}")
        return World.from_environment(processes * options.replication_factor)
    except (ValueError, ImportError) as error:
        raise createPoptorchError(APART.format(process, processes, error)) from error
