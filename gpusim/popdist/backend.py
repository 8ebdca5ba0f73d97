"""The connection between instances. `init` makes it; an uncaught error ends all instances."""

from __future__ import annotations

from gpusim.errors import GpusimError
from gpusim.popdist.replicas import (
    getInstanceIndex,
    getNumInstances,
    isUniformReplicasPerInstance,
)
from gpusim.runtime import activity, environment
from gpusim.runtime.engines import Engine

__all__ = ["engine_between", "init", "isBackendInitialized", "rank_and_size"]

_initialized = False
_engine: Engine | None = None  # None also for a single instance, which needs none


def init() -> None:
    """Connect to the other instances; does nothing the second time, or for a single instance.

    From here on an uncaught exception ends all instances.

    **Raises**

    - `ValueError`: for variables that are missing or contradict each other, and for several
      processes without PopDist's variables.
    - `ImportError`: without mpi4py; it says what to install.
    """
    global _initialized, _engine
    if _initialized:
        return
    launch = environment.read()
    if launch.instances > 1:
        if launch.total_replicas is None:
            raise ValueError(
                f"{launch.launcher} started {launch.instances} instances, but "
                f"{environment.TOTAL}, {environment.LOCAL} and {environment.OFFSET} are not set, "
                "which number the replicas: start the program with poprun"
            )
        from gpusim.runtime.engines import mpi

        _engine = mpi.connect(launch)
    _initialized = True
    activity.note(None)


def isBackendInitialized() -> bool:
    """Whether `init` has been called."""
    return _initialized


def engine_between(caller: str) -> Engine | None:
    """The connection to the other instances; None for a single instance.

    GpusimError (a RuntimeError) before `init` if there are several instances.
    """
    if not _initialized and rank_and_size()[1] > 1:
        raise GpusimError(f"popdist.{caller} needs the other instances: call popdist.init() first")
    return _engine


def rank_and_size() -> tuple[int, int]:
    """The number of this instance and of all, also for an uneven distribution of replicas."""
    if _engine is not None:
        return _engine.instance, _engine.instances
    if not isUniformReplicasPerInstance():
        launch = environment.read()
        return launch.instance, launch.instances
    return getInstanceIndex(), getNumInstances()
