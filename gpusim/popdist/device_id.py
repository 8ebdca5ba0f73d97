"""The device of this instance: instances of one host share its simulated IPUs in equal blocks."""

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

    Instances of a host get devices that share no IPU. A number of IPUs that is no power of two
    takes the next one.

    **Arguments**

    - `ipusPerReplica`: how many a replica has; 0 is what the environment says.

    ValueError if that is not what the environment says; IpuCountError (a ValueError) if the host
    has not enough simulated IPUs (GPUSIM_IPUS).

    >>> getDeviceId(), getDeviceId(2) == Table.from_environment().of_size(2)[0].id
    (0, True)
    """
    if ipusPerReplica < 0:
        raise ValueError(f"ipusPerReplica={ipusPerReplica!r}: expected a number of at least 0")
    told = environment.popdist().ipus_per_replica is not None
    if ipusPerReplica and told and not checkNumIpusPerReplica(ipusPerReplica):
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
            f"all, and there are {table.count}; GPUSIM_IPUS says how many.",
            size * (index + 1),
            reserved(size * (index + 1)),
        )
    return devices[index].id


def most_replicas() -> int:
    """How many replicas the fullest instance holds: all have blocks as large as it needs."""
    if environment.popdist().uniform is not False:
        return getNumLocalReplicas()
    instances = environment.read().instances
    return max(getNumLocalReplicas(), -(-getNumTotalReplicas() // instances))
