"""PopTorch's options under PopDist: the replicas, the process and the device of this instance."""

from __future__ import annotations

from typing import Any, NoReturn

from gpusim.popdist.device_id import getDeviceId
from gpusim.popdist.replicas import (
    checkNumIpusPerReplica,
    getInstanceIndex,
    getNumInstances,
    getNumIpusPerReplica,
    getNumLocalReplicas,
    getNumTotalReplicas,
    getReplicaIndexOffset,
)
from gpusim.poptorch import options as poptorch
from gpusim.runtime import environment

__all__ = ["Options"]


class Options(poptorch.Options):
    """`poptorch.Options` with the settings of poprun, which cannot be changed.

    `replication_factor` is the number of this instance's replicas, `Distributed.processId` the
    number of the instance and `Distributed.numProcesses` that of all. `toDict` includes the device.
    `useIpuId`, `replicationFactor` and the methods of `Distributed` raise a RuntimeError.

    **Arguments**

    - `ipus_per_replica`: the IPUs of a replica; None means the number in the environment.

    **Raises**: ValueError if `ipus_per_replica` contradicts the environment; GpusimError (a
    RuntimeError) if instances hold different numbers of replicas.

    >>> options = Options()
    >>> options.replication_factor, options.Distributed.processId
    (1, 0)
    >>> options.useIpuId(0)
    Traceback (most recent call last):
    ...
    RuntimeError: Cannot call `useIpuId` with popdist.poptorch.Options
    """

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        is_set = environment.popdist().ipus_per_replica is not None
        if ipus_per_replica is not None and is_set and not checkNumIpusPerReplica(ipus_per_replica):
            raise ValueError(
                f"ipus_per_replica={ipus_per_replica}: expected {getNumIpusPerReplica()}, as the "
                "environment says (poprun --ipus-per-replica)"
            )
        self._ipus_per_replica = ipus_per_replica or getNumIpusPerReplica()
        super().__init__()
        self._set_replicas(getNumLocalReplicas())
        self._distributed = _DistributedOptions()
        self._popart.set("enableDistributedReplicatedGraphs", True)
        self._popart.set("globalReplicationFactor", getNumTotalReplicas())
        self._popart.set("globalReplicaOffset", getReplicaIndexOffset())

    def useIpuId(self, ipu_id: int) -> NoReturn:
        """RuntimeError: poprun sets the device."""
        blocked("useIpuId")

    def replicationFactor(self, replication_factor: int) -> NoReturn:
        """RuntimeError: `poprun --num-replicas` sets it."""
        blocked("replicationFactor")

    def toDict(self) -> dict[str, Any]:
        """The dict of PopTorch's options, and the device's id.

        Raises the errors of `popdist.getDeviceId` if the host has too few IPUs.
        """
        return {**super().toDict(), "ipu_id": getDeviceId(self._ipus_per_replica)}


class _DistributedOptions(poptorch._DistributedOptions):
    """The number of this instance; setting it is a RuntimeError."""

    def __init__(self) -> None:
        super().__init__()
        self._set_process(getInstanceIndex(), getNumInstances())

    def disable(self) -> NoReturn:
        """RuntimeError: poprun sets it."""
        blocked("Distributed.disable")

    def setEnvVarNames(self, *args: Any, **kwargs: Any) -> NoReturn:
        """RuntimeError: poprun sets it."""
        blocked("Distributed.setEnvVarNames")

    def configureProcessId(self, *args: Any, **kwargs: Any) -> NoReturn:
        """RuntimeError: poprun sets it."""
        blocked("Distributed.configureProcessId")


def blocked(method: str) -> NoReturn:
    raise RuntimeError(f"Cannot call `{method}` with popdist.poptorch.Options")
