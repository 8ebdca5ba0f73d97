"""The values of PopDist's variables, with the defaults of a single instance.

All functions raise ValueError if the variables are incomplete or contradict each other.
"""

from __future__ import annotations

from gpusim.errors import GpusimError
from gpusim.runtime import environment

__all__ = [
    "checkNumIpusPerReplica",
    "getInstanceIndex",
    "getLocalInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "getReplicaIndexOffset",
    "isPopdistEnvSet",
    "isUniformReplicasPerInstance",
]


def isPopdistEnvSet() -> bool:
    """Whether PopDist's variables are set, as poprun does."""
    return environment.popdist().is_set


def getNumTotalReplicas() -> int:
    """The number of replicas of all instances; 1 without PopDist's variables."""
    return or_default(environment.popdist().total_replicas, 1)


def getNumLocalReplicas() -> int:
    """The number of replicas of this instance; 1 without PopDist's variables."""
    return or_default(environment.popdist().local_replicas, 1)


def getReplicaIndexOffset() -> int:
    """The number of this instance's first replica; 0 without PopDist's variables."""
    return or_default(environment.popdist().replica_offset, 0)


def getNumIpusPerReplica() -> int:
    """The number of IPUs per replica; 1 where POPDIST_NUM_IPUS_PER_REPLICA is not set."""
    return or_default(environment.popdist().ipus_per_replica, 1)


def checkNumIpusPerReplica(arg0: int) -> bool:
    """Whether replicas have `arg0` IPUs, by the variable; without it, whether `arg0` is 1."""
    return arg0 == getNumIpusPerReplica()


def getLocalInstanceIndex() -> int:
    """The number of this instance on its host; 0 without PopDist's variables."""
    return or_default(environment.popdist().local_instance, 0)


def isUniformReplicasPerInstance() -> bool:
    """Whether all instances hold the same number of replicas; True without PopDist's variables."""
    found = environment.popdist()
    if found.uniform is not None or not found.is_set:
        return found.uniform is not False
    total, local, offset = getNumTotalReplicas(), getNumLocalReplicas(), getReplicaIndexOffset()
    if total % local or offset % local:
        return False
    try:
        return environment.read().instances == total // local
    except ValueError:  # the number of instances is unknown
        return True


def getNumInstances() -> int:
    """The number of instances; 1 without PopDist's variables.

    GpusimError (a RuntimeError) if instances hold different numbers of replicas.
    """
    need_uniform("getNumInstances")
    return getNumTotalReplicas() // getNumLocalReplicas()


def getInstanceIndex() -> int:
    """The number of this instance, from 0; 0 without PopDist's variables.

    GpusimError (a RuntimeError) if instances hold different numbers of replicas.
    """
    need_uniform("getInstanceIndex")
    return getReplicaIndexOffset() // getNumLocalReplicas()


def need_uniform(function: str) -> None:
    if not isUniformReplicasPerInstance():
        raise GpusimError(
            f"popdist.{function} needs equally many replicas in all instances: "
            f"{getNumTotalReplicas()} are not divided evenly, this instance holds "
            f"{getNumLocalReplicas()} (POPDIST_UNIFORM_REPLICAS_PER_INSTANCE)"
        )


def or_default(value: int | None, default: int) -> int:
    return default if value is None else value
