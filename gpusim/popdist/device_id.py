"""The device of this instance: each instance of a host has an equal block of its simulated IPUs."""

from __future__ import annotations

from gpusim.devices import IpuCountError, Table, ipus_needed, reserved
from gpusim.popdist.replicas import (
    checkNumIpusPerReplica,
    getLocalInstanceIndex,
    getNumIpusPerReplica,
    getNumLocalReplicas,
    getNumTotalReplicas,
)
from gpusim.runtime import environment

__all__ = ["getDeviceId"]


def getDeviceId(ipusPerReplica: int = 0) -> int:
    """The id, in gc-info's numbering, of the device with the IPUs of this instance's replicas.

    The devices of the instances of a host share no IPU. A number of IPUs that is not a power of
    two is rounded up to one.

    **Arguments**

    - `ipusPerReplica`: the IPUs of a replica; 0 means the number in the environment.

    **Raises**

    - `ValueError`: if `ipusPerReplica` contradicts the environment.
    - `IpuCountError` (a ValueError): if the host has too few simulated IPUs (GPUSIM_IPUS).

    >>> getDeviceId(), getDeviceId(2) == Table.from_environment().of_size(2)[0].id
    (0, True)
    """
    if ipusPerReplica < 0:
        raise ValueError(f"ipusPerReplica={ipusPerReplica!r}: expected a number of at least 0")
    is_set = environment.popdist().ipus_per_replica is not None
    if ipusPerReplica and is_set and not checkNumIpusPerReplica(ipusPerReplica):
        raise ValueError(
            f"ipusPerReplica={ipusPerReplica}: expected {getNumIpusPerReplica()}, "
            f"which {environment.IPUS} says (poprun --ipus-per-replica)"
        )
    size = reserved(ipus_needed(most_replicas(), ipusPerReplica or getNumIpusPerReplica()))
    table = Table.from_environment()
    devices, index = table.of_size(size), getLocalInstanceIndex()
    if index >= len(devices):
        raise IpuCountError(
            f"instance {index} of this host needs {size} IPUs of its own: {size * (index + 1)} in "
            f"all, and there are {table.count}; GPUSIM_IPUS sets the number.",
            size * (index + 1),
            reserved(size * (index + 1)),
        )
    return devices[index].id


def most_replicas() -> int:
    """The replicas of the fullest instance, which sets the size of all blocks."""
    if environment.popdist().uniform is not False:
        return getNumLocalReplicas()
    instances = environment.read().instances
    return max(getNumLocalReplicas(), -(-getNumTotalReplicas() // instances))
